# Sourced by try and test: messages, and a virtual environment in .venv with pagedmlx in it.
# Written for bash 3.2, which is what macOS has.

say() { printf '==> %s\n' "$*" >&2; }

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Prints the first Python that is new enough; PYTHON names another one.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c \
            'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed and none was found (PYTHON=... names one)"
}

make_venv() {
    local python
    if .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' \
        >/dev/null 2>&1; then
        return
    fi
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        fail "Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"
    say "making a virtual environment in .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || fail "could not make .venv"
}

# install NAME SPEC...: pip install, once for each content of pyproject.toml and place of the checkout.
install() {
    local name=$1 stamp
    shift
    stamp="$PWD $(cksum <pyproject.toml) $*"
    if [ "$(cat ".venv/installed-$name" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    say "installing $*"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" ||
        fail "pip could not install $*; its message is above"
    printf '%s\n' "$stamp" >".venv/installed-$name"
}

# make_environment [EXTRA]: pagedmlx from this checkout, with MLX's backend for this machine.
make_environment() {
    local extras=${1:-}
    case "$(uname -s)" in
    Darwin)
        [ "$(uname -m)" = arm64 ] || fail "MLX needs a Mac with Apple silicon"
        ;;
    Linux)
        extras="cpu${extras:+,$extras}"
        ;;
    *)
        fail "$(uname -s) is not supported; macOS and Linux are"
        ;;
    esac
    make_venv
    install "pagedmlx${1:+-$1}" -e ".${extras:+[$extras]}"
}

# Whether matrix products are fast: always on a Mac, with OpenBLAS on Linux.
has_fast_blas() {
    [ "$(uname -s)" = Darwin ] ||
        .venv/bin/python -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' >/dev/null 2>&1
}
