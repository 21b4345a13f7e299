"""The chart of README shows the results as they are in benchmarks/results."""

from xml.etree import ElementTree

from benchmarks.chart import IMAGE, Bar, picture, svg


def test_the_committed_chart_is_drawn_from_the_committed_results() -> None:
    assert IMAGE.read_text() == picture(), "run `make chart`"


def test_longer_times_have_longer_bars_with_their_values() -> None:
    drawn = ElementTree.fromstring(svg([("a", [Bar("short", "served", 0.05), Bar("long", "peer", 13.6)])]))
    widths = [float(rect.get("width", 0)) for rect in drawn.findall("{*}rect")[1:]]
    assert widths == sorted(widths)
    assert {"50 ms", "14 s"} <= {text.text for text in drawn.findall("{*}text")}
