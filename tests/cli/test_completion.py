from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.cli.conftest import Cli


def complete(script: str, *words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n_pagedmlx\n"
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_and_flags(cli: Cli) -> None:
    script = cli("completion", "bash").out
    assert complete(script, "pagedmlx", "g") == ["generate"]
    assert complete(script, "pagedmlx", "--v") == ["--version"]
    assert complete(script, "pagedmlx", "generate", "--top") == ["--top-p", "--top-k"]
    assert complete(script, "pagedmlx", "generate", "--no-o") == ["--no-offline"]
    assert complete(script, "pagedmlx", "rm", "--y") == ["--yes"]
    assert complete(script, "pagedmlx", "generate", "some/pa") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_every_command_and_quotes_what_it_says(cli: Cli, shell: str) -> None:
    result = cli("completion", shell)
    assert (result.code, result.err) == (0, "")
    for word in ("generate", "pull", "doctor", "kv-cache-memory", "kernels", "yes"):
        assert word in result.out
    # Apostrophes of the help texts must not end the quotes that stand around them.
    lines = [line for line in result.out.splitlines() if "doesn" in line]
    assert all(r"doesn'\''t" in line or r"doesn\'t" in line for line in lines)
    assert bool(lines) == (shell != "bash")


def test_another_shell_is_refused_by_name(cli: Cli) -> None:
    result = cli("completion", "tcsh")
    assert result.code == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in result.err
