from __future__ import annotations

from array import array

from pagedmlx.core.block import Block
from pagedmlx.core.prefix import PrefixIndex, hash_tokens, pack_blocks, pack_tokens, root_hash


def test_a_hash_names_the_whole_history_and_not_only_its_block() -> None:
    root = root_hash("model")
    first, other = (hash_tokens(root, pack_tokens(ids)) for ids in ((1, 2), (1, 3)))
    tokens = pack_tokens((5, 6))
    assert hash_tokens(first, tokens) != hash_tokens(other, tokens)
    assert hash_tokens(first, tokens) == hash_tokens(first, pack_tokens([5, 6]))
    assert hash_tokens(root, tokens) != hash_tokens(root, pack_tokens((6, 5)))


def test_tokens_of_any_size_have_their_own_hash() -> None:
    tokens = (0, 1, 255, 256, 65_536, 2**31 - 1)
    assert len({hash_tokens(b"", pack_tokens([token])) for token in tokens}) == len(tokens)


def test_blocks_are_packed_at_once_as_they_are_one_by_one() -> None:
    tokens = array("i", (0, 1, 2**31 - 1, 0, 7, 256, 0, 0))
    assert pack_blocks(tokens, 4) == [pack_tokens(tokens[:4]), pack_tokens(tokens[4:])]
    assert pack_blocks(tokens[:0], 4) == []


def test_salts_are_told_apart_however_they_are_cut() -> None:
    cuts = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("abc",), ()]
    assert len({root_hash(*salts) for salts in cuts}) == len(cuts)
    assert root_hash("\ud800") != root_hash("?")


def test_the_entry_that_begins_most_like_the_tokens_is_found_until_it_is_removed() -> None:
    index = PrefixIndex()
    first, _ = index.publish(Block(0), b"0", pack_tokens((1, 2, 3)), None, b"root")
    entries = {
        ids: index.publish(Block(ids[-1]), bytes(ids), pack_tokens(ids), first, b"root")[0]
        for ids in ((4, 5, 6), (4, 5, 9), (7, 5, 8))
    }
    assert index.find_beginning(pack_tokens((4, 5, 8)), first, b"root") == (entries[4, 5, 6], 2)
    assert index.find_beginning(pack_tokens((7, 5, 8)), first, b"root") == (entries[7, 5, 8], 3)
    assert index.find_beginning(pack_tokens((9, 9, 9)), first, b"root") is None
    assert index.find_beginning(pack_tokens((4, 5, 8)), None, b"root") is None
    assert index.find_beginning(pack_tokens((1, 2, 8)), None, b"root") == (first, 2)
    assert index.find_beginning(pack_tokens((1, 2, 8)), None, b"other") is None
    index.check_integrity()
    for entry in (entries[4, 5, 6], entries[7, 5, 8], first):
        index.remove(entry.block)
        index.check_integrity()
    assert index.find_beginning(pack_tokens((4, 5, 8)), first, b"root") == (entries[4, 5, 9], 2)
    index.remove(entries[4, 5, 9].block)
    assert not index._next


def test_a_block_indexed_anew_leaves_its_old_name() -> None:
    index = PrefixIndex()
    block = Block(0, ref_count=1)
    old, _ = index.publish(block, b"old", pack_tokens([1]), None, b"root")
    new, displaced = index.publish(block, b"new", pack_tokens([2]), None, b"root")
    assert displaced is None
    assert index.find(pack_tokens([1]), None, b"root") is None
    assert not index.is_live(old)
    assert index.is_live(new)
    index.remove(block)
    assert len(index) == 0
