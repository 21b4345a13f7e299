"""The picture of bytes from ranks to workers, as text and as SVG, exactly."""

import xml.etree.ElementTree as ElementTree

import pytest
from resharder.client.tools.check import Traffic, largest_over_mean, svg, text_map

MIB = 1 << 20
THREE = Traffic((0, 1, 4), ((12 * MIB, 0), (6 * MIB, 6 * MIB), (0, 1 * MIB)))
SVG = "{http://www.w3.org/2000/svg}"


def test_the_text_has_a_row_for_each_rank_and_two_characters_for_each_worker() -> None:
    assert text_map(THREE) == [
        "ranks (rows) to workers (columns), darkest 12.0 MiB",
        "         0 1",
        "rank  0  ██    12.0 MiB",
        "rank  1  ▒▒▒▒  12.0 MiB",
        "rank  4    ··  1.0 MiB",
        "sent by a rank: 8.3 MiB on average, 12.0 MiB at most, ratio 1.440",
        "received by a worker: 12.5 MiB on average, 18.0 MiB at most, ratio 1.440",
    ]


def test_many_processes_share_rows_and_columns() -> None:
    many = Traffic(tuple(range(256)), tuple(tuple(1024 * (row == column * 2) for column in range(128)) for row in range(256)))
    lines = text_map(many)
    assert lines[0] == "ranks by 8 (rows) to workers by 6 (columns), darkest 4.0 KiB"
    assert lines[1] == "               0 6 12  24  36  48  60  72  84  96  108 120"
    assert lines[2] == "ranks 0-7      ██                                            4.0 KiB"
    assert lines[3] == "ranks 8-15     ▒▒▒▒                                          4.0 KiB"
    assert len(lines) == 2 + 32 + 2
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("sizes", "ratio"), [((1, 1), 1.0), ((3, 1), 1.5), ((0, 0), 1.0)])
def test_the_imbalance_is_the_largest_over_the_mean(sizes: tuple[int, ...], ratio: float) -> None:
    assert largest_over_mean(sizes) == ratio


def test_the_svg_has_a_cell_for_each_pair_with_its_bytes() -> None:
    drawn = svg(THREE, "Model <1>, 3 ranks")
    root = ElementTree.fromstring(drawn)
    assert [text.text for text in root.iter(f"{SVG}text")] == [
        "Model <1>, 3 ranks",
        "ranks (rows) to workers (columns), darkest 12.0 MiB",
        "0",
        "1",
        "rank 0",
        "12.0 MiB",
        "rank 1",
        "12.0 MiB",
        "rank 4",
        "1.0 MiB",
        "sent by a rank: 8.3 MiB on average, 12.0 MiB at most, ratio 1.440",
        "received by a worker: 12.5 MiB on average, 18.0 MiB at most, ratio 1.440",
    ]
    cells = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert [(cell.get("x"), cell.get("y"), cell.get("fill-opacity"), cell.findtext(f"{SVG}title")) for cell in cells] == [
        ("84", "64", "1.000", "12.0 MiB"),
        ("106", "64", "0.000", "0 B"),
        ("84", "86", "0.500", "6.0 MiB"),
        ("106", "86", "0.500", "6.0 MiB"),
        ("84", "108", "0.000", "0 B"),
        ("106", "108", "0.083", "1.0 MiB"),
    ]
    bars = [rect.get("width") for rect in root.iter(f"{SVG}rect") if rect.get("x") == "134"]  # beside each row
    assert bars == ["60", "60", "5"]
    assert "script" not in drawn
