import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pathways.slurm.hostlist import MAX_HOSTS, HostlistError, compress, expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a", ["a"]),
        (
            "n[1-3,07-09],rack[0-1]node[2-3],a",
            ["n1", "n2", "n3", "n07", "n08", "n09", "rack0node2", "rack0node3", "rack1node2", "rack1node3", "a"],
        ),
        # The digits of the lower bound give the width of a range, each for itself.
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("n[008-10]", ["n008", "n009", "n010"]),
        ("n[1-03]", ["n1", "n2", "n3"]),
        ("n[0998-1001]", ["n0998", "n0999", "n1000", "n1001"]),
        # In Slurm's order, not sorted, with repetitions.
        ("b[3,1-2],a,b1", ["b3", "b1", "b2", "a", "b1"]),
        ("n1 n2\tn3\nn4,,n5, n6", ["n1", "n2", "n3", "n4", "n5", "n6"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("[1-2]", ["1", "2"]),
        ("a[0-1]b[0-1]c[0-1]", [f"a{i}b{j}c{k}" for i in "01" for j in "01" for k in "01"]),
        ("gpu-a.cluster.example[1,3]", ["gpu-a.cluster.example1", "gpu-a.cluster.example3"]),
        ("x[00000000000000000000001-3]", [f"x{i:023d}" for i in (1, 2, 3)]),
    ],
)
def test_expand(text: str, hosts: list[str]) -> None:
    assert list(expand(text)) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n[1-3", "closing bracket is missing"),
        ("n1-3]", "brackets must match"),
        ("n[1[2]]", "may not be nested"),
        ("n[]", "'' in node list .* is no range"),
        ("n[1,]", "'' in node list .* is no range"),
        ("n[a-b]", "'a-b' in node list .* is no range"),
        ("n[1-]", "'1-' in node list .* is no range"),
        ("n[-1]", "is no range"),
        ("n[1--2]", "is no range"),
        ("n[0-10/2]", "is no range"),
        ("n[0-10:2]", "is no range"),
        ("n[1 - 2]", "is no range"),
        ("n[٣]", "is no range"),
        ("n[3-1]", "from the smaller to the larger"),
        ("n[0-65536]", "more than 65536 hosts"),
        ("n[0-999]x[0-999]", "more than 65536 hosts"),
        ("a,n[0-65535]", "more than 65536 hosts"),
        ("n[0-99999999999999999999999]", "more than 65536 hosts"),
    ],
)
def test_what_is_no_list(text: str, words: str) -> None:
    with pytest.raises(HostlistError, match=words):
        expand(text)


def test_the_largest_list() -> None:
    assert len(expand(f"n[0-{MAX_HOSTS - 1}]")) == MAX_HOSTS


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["n1"], "n1"),
        (["n1", "n2", "n3", "n07", "n08", "a"], "n[1-3,07-08],a"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10"], "n[09-10]"),
        # 9 as 09 and 10 as 010 are no neighbours.
        (["n09", "n010"], "n[09,010]"),
        (["n2", "n1", "n2"], "n[2,1-2]"),
        (["r0n1", "r0n2", "r1n1", "r1n2"], "r0n[1-2],r1n[1-2]"),
        (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
        (["1", "2"], "[1-2]"),
    ],
)
def test_compress(hosts: list[str], text: str) -> None:
    assert compress(hosts) == text


@pytest.mark.parametrize("host", ["", "a,b", "a[1]", "a b", "a\n"])
def test_what_is_no_host(host: str) -> None:
    with pytest.raises(HostlistError, match="is no host name"):
        compress(["ok", host])


def brute_force(text: str) -> list[str]:
    """The first bracket replaced by each of its numbers, again and again: slow, and shares nothing with the parser."""
    hosts = []
    for item in re.split(r",(?![^\[]*\])", text):
        match = re.search(r"\[([^\]]*)\]", item)
        if match is None:
            hosts.append(item)
            continue
        for part in match[1].split(","):
            low, _, high = part.partition("-")
            for number in itertools.count(int(low)):
                if number > int(high or low):
                    break
                hosts.extend(
                    brute_force(item[: match.start()] + str(number).rjust(len(low), "0") + item[match.end() :])
                )
    return hosts


_names = st.text("abz-._019", min_size=1, max_size=6)
_numbers = st.integers(0, 120)


@st.composite
def _brackets(draw: st.DrawFn) -> str:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        low = draw(_numbers)
        text = str(low).rjust(draw(st.integers(1, 4)), "0")
        parts.append(text if draw(st.booleans()) else f"{text}-{low + draw(st.integers(0, 12))}")
    return f"[{','.join(parts)}]"


@st.composite
def _lists(draw: st.DrawFn) -> str:
    items = [
        "".join(draw(st.sampled_from([draw(_names), draw(_brackets())])) for _ in range(draw(st.integers(1, 3))))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return ",".join(items)


@settings(deadline=None)
@given(_lists())
def test_agrees_with_brute_force(text: str) -> None:
    assert list(expand(text)) == brute_force(text)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(_names, st.builds(lambda name, n, width: f"{name}{n:0{width}d}", _names, _numbers, st.integers(1, 3)))
    )
)
def test_compressed_lists_expand_to_the_same(hosts: list[str]) -> None:
    assert list(expand(compress(hosts))) == hosts


@settings(deadline=None)
@given(_lists())
def test_compressing_what_was_expanded_changes_nothing(text: str) -> None:
    assert expand(compress(expand(text))) == expand(text)


@settings(deadline=None)
@given(st.text("ab01[]-, \n/", max_size=20))
def test_any_text_is_a_list_or_an_error_of_ours(text: str) -> None:
    try:
        hosts = expand(text)
    except HostlistError:
        return
    assert all(hosts)
    assert expand(compress(hosts)) == hosts
