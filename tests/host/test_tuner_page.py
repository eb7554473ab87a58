"""The tuner's report: one file, which says what its numbers are."""

from html.parser import HTMLParser

import pytest
from tuner_fakes import SETTINGS, Fake, job

from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.tuner.page import page, tiles
from tpu_serve.tuner.run import Tuner
from tpu_serve.tuner.trial import REFUSED, Trial


class Elements(HTMLParser):
    """Collects tags with their attributes, and text by the tag it stands in."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "rect"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self._open[-1], data))

    def of(self, tag):
        return [text for one, text in self.texts if one == tag]


def result(answer, kind, **changes):
    return Tuner(Fake(answer, kind), SETTINGS).tune(job(**changes))


@pytest.mark.parametrize(
    ("kind", "heading", "words"),
    [
        ("measured", "measured", "Scores are measured"),
        ("schedule", "modelled from compiled schedules", "Nothing was measured."),
        ("bytes", "compiled, ranked by calculation", "Nothing was measured."),
    ],
)
def test_the_heading_says_what_the_scores_are(kind, heading, words):
    found = Elements(page([result(lambda task, number: 100.0 - number, kind)]))
    assert found.of("h1") == [f"Configs of fused_moe_v2: {heading}"]
    assert any(words in text for text in found.of("p"))
    others = {"measured": "modelled", "schedule": "Scores are measured", "bytes": "Scores are measured"}[kind]
    assert not any(others in text for text in found.of("p"))


def test_every_candidate_is_drawn_and_the_chosen_one_is_marked():
    failed = Trial(REFUSED, "MosaicError: <no> & never")
    one = result(lambda task, number: failed if number == 1 else [100.0, 0, 50.0, 120.0][number], "schedule")
    text = page([one, result(lambda task, number: 1.0, "schedule", format="fp8_channel")])
    found = Elements(text)
    bars = [attributes for tag, attributes in found.tags if tag == "rect"]
    assert [bar["class"] for bar in bars] == ["bar", "chosen", "bar"]
    widths = [float(bar["width"]) for bar in bars]
    assert widths[1] / widths[2] == pytest.approx(50 / 120, rel=0.01)
    lines = found.of("text")
    assert sum("(chosen)" in line for line in lines) == 1
    assert f"{tiles(one.chosen)} (chosen)" in lines
    assert lines[0] == f"heuristic: {tiles(one.trials[0][0])}"
    assert "refused: MosaicError: <no> & never" in lines
    said = found.of("p")
    assert any(
        line.startswith("50.0 (schedule); 4 tried") and "50 % below the heuristic's config" in line for line in said
    )
    assert any(line.startswith("refused: format fp8_channel") for line in said)
    assert any("2 keys: 1 tuned, 1 refused, 0 failed" in line for line in said)


def test_it_needs_nothing_else():
    found = Elements(page([result(lambda task, number: 1.0, "measured")]))
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "link", "img", "iframe"})
    assert not any(name in ("src", "href") for _, attributes in found.tags for name in attributes)


def test_tiles_in_words():
    assert tiles(Config("D", 256, 3)) == "mode D, tiles of 256 columns, 3 in the ring, products with all tokens"
    picked = Config("D", 256, 3, compact_rows=32)
    assert tiles(picked).endswith("products with 32 picked rows")
    gathered = Config("G", 512, 4, 256, 128, "push_ag", "push", rounds=2, resident=True)
    assert tiles(gathered) == (
        "mode G, push_ag in 2 rounds and push, tiles of 512 columns, 4 in the ring, blocks of 256 rows by 128, tokens in VMEM"
    )
