"""Named mixes: their shares of work beside the traces' own, and files that are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from attention.errors import UserError
from data.mix import COLUMNS, FOLDER, LengthClass, load_mix, mix_of
from data.mixes import make_mixes
from data.requests import Bucket, RequestLength, shape_weights

NAMED = ("chat", "code", "long-context", "reasoning")
HEADER = ",".join(COLUMNS)


def weights(buckets: Iterable[Bucket], family: str) -> dict[int, float]:
    return {b.kv_len: b.weight for b in buckets if b.family == family}


def file(folder: Path, *lines: str) -> str:
    path = folder / "mine.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_every_named_mix_is_tested_here() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.csv")) == list(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_a_named_mix_says_where_it_is_from_and_stays_small(name: str) -> None:
    mix = load_mix(name)
    assert mix.name == name
    assert "CC-BY 4.0" in mix.source or "Apache-2.0" in mix.source
    assert "histogram" in mix.note or mix.source.startswith("synthesised")
    assert 20 <= len(mix.classes) <= make_mixes.MAX_CLASSES
    assert sum(one.share for one in mix.classes) == pytest.approx(1)


# Shares of work by bucket, of every request of the trace: (in + 1) in / 2 and steps by KV length, buckets as
# `shape_bucket` cuts them.
TRACES = [
    ("chat", "prefill", {1024: 0.0400, 2048: 0.2040, 4096: 0.5642, 8192: 0.1699}),
    ("chat", "decode", {256: 0.0337, 512: 0.1532, 1024: 0.0368, 2048: 0.7141, 4096: 0.0311, 8192: 0.0229}),
    ("code", "prefill", {1024: 0.0115, 2048: 0.0701, 4096: 0.2367, 8192: 0.6799}),
    ("code", "decode", {512: 0.0880, 1024: 0.1527, 2048: 0.2443, 4096: 0.2525, 8192: 0.1444}),
    ("long-context", "decode", {2048: 0.1573, 8192: 0.2098, 16384: 0.2297, 32768: 0.1679, 65536: 0.0604}),
    ("long-context", "extend", {16384: 0.0860, 32768: 0.2081, 65536: 0.2361, 131072: 0.4451}),
    ("reasoning", "prefill", {8192: 0.0396, 16384: 0.1318, 32768: 0.3600, 65536: 0.4393}),
    ("reasoning", "decode", {1024: 0.1382, 2048: 0.2026, 4096: 0.2116, 8192: 0.1681, 16384: 0.1054}),
]


@pytest.mark.parametrize(("name", "family", "shares"), TRACES)
def test_classes_keep_the_shares_of_work_of_their_requests(name: str, family: str, shares: dict[int, float]) -> None:
    found = weights(load_mix(name).buckets(), family)
    within = 0.013 if family == "decode" else 0.003
    assert {kv_len: found[kv_len] for kv_len in shares} == pytest.approx(shares, abs=within)


# SHAPE_WEIGHTS.csv of the traffic facts, counted by others: pf_attn_work is in^2 with no cache, dec_steps_kv puts a
# request's output at 16 points evenly between prompt and prompt + output; their buckets are [low, high).
PUBLISHED = [
    ("chat", "prefill", {2048: 0.2049, 4096: 0.5595, 8192: 0.1747}),
    ("chat", "decode", {2048: 0.7130, 4096: 0.0312, 8192: 0.0232}),
    ("code", "prefill", {2048: 0.0700, 4096: 0.2368, 8192: 0.6800}),
    ("code", "decode", {1024: 0.1527, 2048: 0.2443, 4096: 0.2523, 8192: 0.1443}),
    ("long-context", "prefill", {16384: 0.0828, 32768: 0.2141, 65536: 0.2433, 131072: 0.4370}),
    ("long-context", "decode", {2048: 0.1573, 4096: 0.1237, 8192: 0.2099, 16384: 0.2297, 32768: 0.1679}),
]


@pytest.mark.parametrize(("name", "family", "shares"), PUBLISHED)
def test_shares_of_work_agree_with_the_published_weights(name: str, family: str, shares: dict[int, float]) -> None:
    uncached = [replace(one, cached_tokens=0) for one in load_mix(name).lengths()]
    found = weights(shape_weights(uncached), family)
    assert {kv_len: found[kv_len] for kv_len in shares} == pytest.approx(shares, abs=0.01)


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("chat", 1154.7, 211.1),
        ("code", 2047.8, 27.9),
        ("long-context", 12035.1, 342.6),
        ("reasoning", 1268.2, 1527.4),
    ],
)
def test_mean_lengths_are_those_of_the_trace(name: str, prompt: float, output: float) -> None:
    classes = load_mix(name).classes
    assert sum(c.share * c.prompt_tokens for c in classes) == pytest.approx(prompt, rel=1e-3)
    assert sum(c.share * c.output_tokens for c in classes) == pytest.approx(output, rel=2e-3)


def test_nearly_every_prompt_of_the_long_context_trace_extends_a_cached_prefix() -> None:
    mix = load_mix("long-context")
    assert sum(c.share for c in mix.classes if c.cached_tokens == 0) == pytest.approx(1 / 12031)
    cached = sum(c.share * c.cached_tokens for c in mix.classes) / sum(c.share * c.prompt_tokens for c in mix.classes)
    assert cached == pytest.approx(0.36, abs=0.02)  # 36.6 % of the blocks; the last one of a prompt is not full


def test_a_mix_of_recorded_lengths_has_their_own_buckets() -> None:
    recorded = [RequestLength("a", 300, 9), RequestLength("b", 300, 9), RequestLength("c", 2000, 70, 512)]
    mix = mix_of("ours", recorded)
    assert mix.classes == (LengthClass(300, 0, 9, 2 / 3), LengthClass(2000, 512, 70, 1 / 3))
    assert [(b.shape_bucket, b.q_len) for b in mix.buckets()] == [
        (b.shape_bucket, b.q_len) for b in shape_weights(recorded)
    ]
    assert [b.units for b in mix.buckets()] == pytest.approx([b.units for b in shape_weights(recorded)])


def test_a_mix_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="mix ours: no requests"):
        mix_of("ours", [])


def test_a_sample_follows_the_shares_and_its_seed() -> None:
    mix = mix_of("two", [RequestLength("a", 100, 10, count=9), RequestLength("b", 5000, 10, count=1)])
    drawn = mix.sample(4000, seed=7)
    assert drawn == mix.sample(4000, seed=7) != mix.sample(4000, seed=8)
    assert Counter(one.prompt_tokens for one in drawn)[5000] == pytest.approx(400, abs=60)


def test_a_file_is_read_with_its_comments(tmp_path: Path) -> None:
    mix = load_mix(file(tmp_path, "# source: us: 2026", "# note: made up", HEADER, "100,0,5,30", "4096,512,7,10"))
    assert (mix.name, mix.source, mix.note) == ("mine", "us: 2026", "made up")
    assert mix.classes == (LengthClass(100, 0, 5, 0.75), LengthClass(4096, 512, 7, 0.25))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((), "first line that is no comment must be prompt_tokens"),
        (("a,b",), "first line that is no comment must be prompt_tokens"),
        ((HEADER,), "no requests"),
        ((HEADER, "1,0,5,1", "many,0,5,1"), "line 3: give four numbers"),
        ((HEADER, "100,0,5"), "line 2: give four numbers"),
        ((HEADER, "100,0,5,1,1"), "line 2: give four numbers"),
        ((HEADER, "100,0,0,1"), "line 2: prompt_tokens 100 and output_tokens 0"),
        (("# x", HEADER, "100,100,5,1"), "line 3: cached_tokens 100 of a prompt of 100"),
        ((HEADER, "100,0,5,nan"), "line 2: count nan"),
        ((HEADER, "100,0,5,-1"), "line 2: count -1"),
    ],
)
def test_a_file_that_is_no_mix_says_what_is_wrong_where(tmp_path: Path, lines: tuple[str, ...], told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        load_mix(file(tmp_path, *lines))
    assert "\n" not in str(raised.value)


def test_an_unknown_name_says_the_nearest_and_bytes_are_no_mix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mix 'chta': .*did you mean chat"):
        load_mix("chta")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match=r"bytes.csv: cannot be read"):
        load_mix(str(tmp_path / "bytes.csv"))


# How the named ones are made; the traces themselves are not in the repository.


def test_a_block_counts_as_cached_from_its_second_use_on_and_only_in_a_leading_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(1200, [0, 1, 2]), (1500, [0, 1, 3]), (1500, [9, 1, 3]), (1024, [0, 1])]
    trace.write_text(
        "".join(f'{{"timestamp": 0, "input_length": {n}, "output_length": 4, "hash_ids": {ids}}}\n' for n, ids in rows)
    )
    # The last prompt is cached whole; its last token is computed all the same.
    assert [cached for _, cached, _ in make_mixes.mooncake(trace)] == [0, 1024, 0, 1023]


def test_synthetic_lengths_have_the_published_quantiles_and_mean() -> None:
    at = [(i + 0.5) / 20_000 for i in range(20_000)]
    drawn = make_mixes.quantiles([208, 2092, 23423, 57284], 1268.25, at)
    assert drawn == sorted(drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(1268.25, rel=1e-6)
    assert [drawn[round(q * 20_000)] for q in (0.5, 0.9, 0.99)] == pytest.approx([208, 2092, 23423], rel=0.01)
    assert 55_000 < drawn[-1] <= 57_284


def test_a_histogram_keeps_tokens_and_requests_and_no_class_straddles_a_bucket() -> None:
    requests = [(1 + 37 * i % 9000, 0, 1 + i % 400) for i in range(3000)]
    requests += [(2100 + i % 1900, 512 * (1 + i % 4), 1 + i % 300) for i in range(2000)]
    rows = make_mixes.histogram(requests)
    assert len(rows) == make_mixes.MAX_CLASSES
    assert sum(row[3] for row in rows) == len(requests)
    for column in (0, 1, 2):
        total = sum(row[column] * row[3] for row in rows)
        assert total == pytest.approx(sum(request[column] for request in requests), rel=5e-3)
    exact = shape_weights([RequestLength("", p, o, c) for p, c, o in requests])
    found = shape_weights([RequestLength("", p, o, c, n) for p, c, o, n in rows])
    assert weights(found, "prefill") == pytest.approx(weights(exact, "prefill"), abs=2e-3)
    [extend], [found_extend] = ([b for b in buckets if b.family == "extend"] for buckets in (exact, found))
    assert found_extend.units == pytest.approx(extend.units, rel=0.01)


def test_the_same_traces_give_the_same_bytes() -> None:
    requests = [(1 + 37 * i % 9000, 0, 1 + i % 400) for i in range(3000)]
    assert make_mixes.text_of("chat", requests) == make_mixes.text_of("chat", requests[::-1])
