"""Figures: what stands in a table, and where it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.bench import document, machine, usage
from e2e.bench.figures import Row, Section, number, percentile


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 2.0, 3.0], 50, 2.5),
        ([5.0], 99, 5.0),
        ([float(one) for one in range(1, 101)], 99, 99.0),
        ([float(one) for one in range(1, 201)], 99, 198.0),
    ],
)
def test_percentiles(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0471, "0.0471"),
        (0.00012, "0.0001"),
        (1.234, "1.23"),
        (41.26, "41.3"),
        (187.4, "187"),
        (2046, "2046"),
    ],
)
def test_numbers_have_three_digits_that_count(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_row_shows_a_99th_percentile_only_of_enough_values() -> None:
    few, many = Row("few", [1.0] * 99, "ms"), Row("many", [1.0] * 100, "ms", "< 2")
    assert few.cells() == ("few", "99", "1.00", "-", "1.00", "1.00", "ms", "")
    assert many.cells() == ("many", "100", "1.00", "1.00", "1.00", "1.00", "ms", "< 2")
    assert Row("none", [], "ms").cells() == ("none", "0", "-", "-", "-", "-", "ms", "")


def test_a_section_takes_the_place_of_its_last_writing_and_of_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "performance.md"
    file.write_text(
        "before\n<!-- begin one -->\nold\n<!-- end one -->\nbetween\n<!-- begin two -->\n<!-- end two -->\n"
    )
    section = Section("one", "Title", "make bench", ["a note with \\1 in it"])
    section.add("pause", [1.0, 3.0], "ms", "< 5")
    for _ in range(2):
        document.put("one", section.markdown(), file)
    text = file.read_text()
    assert text.startswith("before\n<!-- begin one -->\n### Title\n")
    assert "- a note with \\1 in it" in text
    assert "| pause | 2 | 2.00 | - | 1.00 | 3.00 | ms | < 5 |" in text
    assert text.endswith("<!-- end one -->\nbetween\n<!-- begin two -->\n<!-- end two -->\n")
    assert "old" not in text


@pytest.mark.parametrize("content", ["", "<!-- begin one -->", "<!-- begin one --><!-- end one -->" * 2])
def test_a_document_without_one_place_for_it_is_refused(content: str) -> None:
    with pytest.raises(document.MarkerMissing, match="<!-- begin one -->"):
        document.replaced(content, "one", "text")


def test_the_document_has_a_place_for_each_benchmark() -> None:
    content = document.DOCUMENT.read_text()
    for name in ("cluster", "controller"):
        assert document.replaced(content, name, "x") != content


def test_usage_is_read_from_proc() -> None:
    stat = "42 (a (b) c) S 1 42 42 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 8 0 100 1000 200"
    found = usage.parse(10.0, stat, "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nThreads:\t1\n")
    assert found == usage.Usage(10.0, 300 / 100, 2**20, 2 * 2**20)
    later = usage.Usage(14.0, found.cpu + 1.0, 2**20, 2**20)
    assert usage.cpu_percent(found, later) == pytest.approx(25.0)


def test_versions_are_those_that_are_pinned(tmp_path: Path) -> None:
    assert set(machine.pinned_versions("router", "smg", "aiohttp")) == {"smg", "aiohttp"}
    lock = tmp_path / "requirements.lock"
    lock.write_text("sglang-kernel==0.1 --hash=x\nsglang==0.5.23 --hash=sha256:00\n")
    assert machine.locked_version(lock, "sglang") == "0.5.23"
