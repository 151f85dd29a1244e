from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from bench import made

from eyas.bench import report
from eyas.bench.benchmark import read, write
from eyas.bench.charts import _marks
from eyas.bench.compare import compare
from eyas.bench.passes import BenchError, Level, Pass

LEVELS = [Level("concurrency", n) for n in (1, 4, 16)]
VOID = {"meta", "link", "br", "line", "polyline", "polygon", "circle", "rect"}


class Page(HTMLParser):
    """Every tag that is opened is closed, in order; and what is referred to."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.marked = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "mark" in self.open:
            self.marked += data


@pytest.fixture(scope="module")
def results():
    return json.loads(json.dumps(made.results(made.pairs(LEVELS, [1.6, 1.3, 0.9], ("chat", "code")), 3600.0)))


def test_the_page_needs_nothing_else(results):
    text = report.html(results)
    page = Page(text)
    assert page.open == [] and page.links == ["data:,"] and "script" not in page.tags
    assert not re.search(r"url\(|@import", text) and "default-src 'none'" in text
    sentence = results["verdict"]["sentence"]
    for words in ("Pays at some levels only", sentence, "prefers-color-scheme: dark", "width=device-width"):
        assert words in text
    assert page.tags.count("svg") == 2 + 2 * 3, "speedup, acceptance, three latencies at the first and last level"


def test_drafted_tokens_are_tinted_and_text_is_only_text(results):
    text = report.html(results)
    assert "dives &lt;b&gt;&amp; strikes" in text and "<b>&" not in text
    assert Page(text).marked.count(made.TEXT[10:]) == 2, "one sample of each task"


def test_what_is_unknown_is_not_made_up():
    """Without streams and without acceptance: no times to the first token, no pictures of them."""
    pairs = made.pairs(LEVELS[:1], [1.5])
    record = [json.loads(json.dumps([p.without.as_record(), p.with_.as_record()])) for p in pairs]
    for sides in record:
        for one in sides:
            one["speculation"] = None
            for answer in one["answers"]:
                del answer["first"], answer["gaps"]
    blind = [made.Pair(*map(Pass.from_record, sides)) for sides in record]
    results = made.results(blind)
    row = results["rows"][0]
    assert row["with"]["first"] is row["with"]["per_token"] is row["acceptance"] is row["step"] is None
    assert row["word"] == "pays", "the times of whole answers are enough for a verdict"
    page = Page(report.html(results))
    assert page.tags.count("svg") == 2  # speedup, end to end
    assert "unknown" in report.markdown(results)


def test_where_the_time_of_a_step_goes(results):
    made_so = {**results, "profile": json.loads(json.dumps(made.profile(LEVELS[::2])))}
    text = report.html(made_so)
    page = Page(text)
    assert page.open == [] and page.tags.count("svg") == 2 + 2 + 2 * 3
    for words in (
        "concurrency 1, profiled",
        "concurrency 16, profiled",
        "5.56 ms (51.5%)",
        "16.2 ms, of 10",
        "Rank 0 of 8",
    ):
        assert words in text, words
    assert "without speculation, all-reduce: 5.56 ms, 51.5%" in text and "mixture of experts" not in text
    table = report.markdown(made_so)
    assert "| 1 | all-reduce | 5.56 ms (51.5%) | 8.34 ms (51.5%) |" in table and "Means of steps that only" in table
    assert "Where the time" not in report.markdown(results) and "Where the time" not in report.html(results)


def test_where_the_time_of_a_step_goes_as_far_as_it_is_known(results):
    """Steps that nobody counted have shares, and no time; a side without a profile has nothing."""
    uncounted = {**results, "profile": made.profile(LEVELS[:1], steps=None)}
    text = report.markdown(uncounted)
    assert "| 1 | all-reduce | 51.5% | 51.5% |" in text and "| 1 | whole step | steps not counted |" in text
    assert "without speculation, all-reduce: 51.5%<" in report.html(uncounted)
    one = {**results, "profile": made.profile(LEVELS[:1], **{"with": None})}
    assert "| 1 | all-reduce | 5.56 ms (51.5%) | - |" in report.markdown(one)
    assert Page(report.html(one)).tags.count("svg") == 3 + 2 * 3


def test_markdown_is_a_table_to_paste(results):
    text = report.markdown(results)
    lines = text.splitlines()
    assert lines[0] == "### Speculation: pays at some levels only"
    table = [line for line in lines if line.startswith(("| 1 |", "| 4 |", "| 16 |"))]
    assert len(table) == 9 + 6 and len({line.count("|") for line in table[:9]}) == 1
    assert "| 1 | all | pays | 1." in text and "| 16 | all | does not pay | 0." in text
    assert "left out of the built-in prompts: 1 empty (line 3)" in text
    assert report.markdown_table([["a|b"], ["c\nd"]]) == "| a\\|b |\n| --- |\n| c d |"


def test_break_even(results):
    assert report.break_even(results).startswith("about ")
    assert report.break_even(made.results(made.pairs(LEVELS, [1.5, 1.4, 1.3]))) == "above 16"
    assert report.break_even(made.results(made.pairs(LEVELS, [0.9, 0.9, 0.8]))) == "below 1"


def test_results_are_read_as_they_were_written(results, tmp_path):
    file = tmp_path / "new" / "a.json"
    write(file, json.dumps(results))
    assert read(file) == results and list(file.parent.iterdir()) == [file]
    for content, words in (
        ("{", "is not JSON"),
        ("[]", "does not hold results"),
        ('{"kind": "other"}', "does not hold"),
    ):
        file.write_text(content)
        with pytest.raises(BenchError, match=words):
            read(file)
    with pytest.raises(BenchError, match="cannot be read"):
        read(tmp_path / "missing.json")
    with pytest.raises(BenchError, match="cannot be written"):
        write(file / "below.json", "")


def test_two_results_beside_one_another(results):
    after = json.loads(json.dumps(made.results(made.pairs(LEVELS[:2], [1.6, 1.8], ("chat", "code")))))
    cells, unlike = compare(results, after)
    assert len(cells) == 1 + 6 and unlike == []
    same, better = cells[1], cells[4]
    assert same[:2] == ["concurrency 1", "all"] and "intervals overlap" in same[4]
    assert "overlap" not in better[4] and float(better[4].rstrip("%")) > 10 and better[7] == "2.50 -> 2.50"
    after["settings"]["sampling"]["max_tokens"] = 7
    after["sides"]["with"]["version"] = "2"
    assert [line.split(":")[0] for line in compare(results, after)[1]] == ["max_tokens", "version with speculation"]
    with pytest.raises(BenchError, match="no level and task in common"):
        compare(results, made.results(made.pairs([Level("request rate", 1)], [1.0])))


@pytest.mark.parametrize(("most", "marks"), [(1.7, [0, 0.5, 1, 1.5, 2]), (0, [0, 0.2, 0.4, 0.6, 0.8, 1])])
def test_axes_have_round_numbers_that_enclose_the_values(most, marks):
    assert _marks(most) == pytest.approx(marks)
