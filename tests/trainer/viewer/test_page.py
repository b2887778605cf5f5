"""The page in a real browser, on a run that has everything. Every test fails on an error or a
request elsewhere."""

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest

from rolltap.trainer.traces.reader import RecordedCalls, recorded_ids
from rolltap.trainer.viewer.file import write_file
from tests.deep import DEEP
from tests.trainer.viewer.conftest import all_read
from tests.trainer.viewer.runs import ATTACK, OLD, STRANGE_ID, WHY, grow, many_sessions

STORED = Path(__file__).parents[2] / "stored_run" / "run"
LONG = "#/session/s-long"
VIEWS = {
    "#/": "Ledger",
    "#/sessions": "of 7 sessions",
    "#/sessions?show=groups": "compare best and worst",
    LONG: "sub-agent 1",
    f"{LONG}?tab=judgement": "AssertionError",
    f"{LONG}?tab=tokens": "those that are not trained first",
    f"{LONG}?tab=group": "compare",
    f"{LONG}?tab=events": "connection lost",
    f"{LONG}/call/s-long-9": "First difference",
    f"{LONG}/call/s-long-1?color=version&token=420": "weights that sampled it",
    "#/compare?a=s-good&b=s-long": "then in call s-long-9",
    "#/nowhere": "no such view",
}


def go(page, address: str) -> None:
    page.evaluate("address => { location.hash = address }", address)


def text(page) -> str:
    return page.inner_text("main")


def walk(page, *clicks: str) -> None:
    """Click on at most five elements, one after the other."""
    assert len(clicks) <= 5
    for each in clicks:
        page.locator(each).first.click()


def open_views(page) -> None:
    for address, shown in VIEWS.items():
        go(page, address)
        page.locator(f"main >> text={shown} >> visible=true").first.wait_for()


@pytest.mark.parametrize("colors", ["light", "dark"])
def test_every_view_opens(open_page, served, colors):
    open_views(open_page(served, color_scheme=colors))


def test_a_recorded_run_opens_down_to_each_of_its_calls(open_page, serve):
    page = open_page(serve(STORED))
    for session_id in recorded_ids(STORED):
        go(page, f"#/session/{quote(session_id)}")
        page.wait_for_selector(f"h1:has-text('{session_id}')")
        for call in RecordedCalls(STORED)[session_id]:
            go(page, f"#/session/{quote(session_id)}/call/{call.call_id}")
            page.wait_for_selector(f"h1:has-text('call {call.call_id}')")
            page.wait_for_selector(".tokens span")


def test_the_points_of_a_metric_lead_to_the_sessions_of_their_steps(page):
    page.select_option(".select select", "age/mean")
    page.focus("[aria-label='age/mean by step'] >> [aria-label='step 3: 0.5']")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('1 of 7 sessions')")


PANELS = [
    "reward",
    "loss",
    "gradient norm",
    "learning rate",
    "seconds of a step",
    "engine difference",
    "evaluation",
    "sampled tokens",
]
"""Titles of the panels of the training that `plotted` writes."""


@pytest.fixture
def plotted(viewed_run, tmp_path, serve, open_page):
    """The page of a run with the metrics of a training, with long names and large numbers."""
    run = shutil.copytree(viewed_run, tmp_path / "run")
    with (run / "metrics.jsonl").open("w") as metrics:
        for step in range(1, 1201, 100):
            row = {"step": step, "reward": step / 1200, "loss": -1.5e-7 * step, "grad_norm": 1.5}
            row |= {"learning_rate": 1e-6, "engine_difference": 1e-5, "difference/root": 0.0}
            row |= {"tokens_trained": 123_456_789.0 * step, "left_out/aborted": 0.0, "odd": 1.0}
            row |= {"eval/step": step - 1, "eval/reward": 0.5, "eval/pass@8_low": 0.1}
            for phase in ("rollout", "publication", "training"):
                row[f"seconds_{phase}"] = float(step)
            for number in range(1, 13):
                row[f"reward/task/a-long-name-of-a-task-{'x' * 40}-{number}"] = number / step
            metrics.write(json.dumps(row) + "\n")
    page = open_page(serve(run))
    page.wait_for_selector(".plot")
    return page


CUT = """() => [...document.querySelectorAll('.chart text, .plot .chip')].filter((each) => {
    const box = each.getBoundingClientRect();
    const frame = each.closest('svg, .plot').getBoundingClientRect();
    return box.left < frame.left || box.right > frame.right + 0.5 || box.top < frame.top || box.bottom > frame.bottom
        || each.scrollWidth > each.clientWidth && each.matches('.chip');
}).map((each) => each.textContent)"""


def test_metrics_of_a_training_are_plotted_together_no_label_is_cut_and_each_leads_to_its_points(
    plotted,
):
    assert plotted.locator(".plot h3").all_inner_texts() == PANELS
    seconds = plotted.locator(".plot", has=plotted.locator("h3:has-text('seconds of a step')"))
    labels = ["seconds_publication 1,101", "seconds_rollout 1,101", "seconds_training 1,101"]
    assert [each.strip() for each in seconds.locator(".chip").all_inner_texts()] == labels
    rewards = plotted.locator(".plot", has=plotted.locator("h3:text-is('reward')"))
    assert "and 5 more" in rewards.inner_text()
    for width in (1280, 480):
        plotted.set_viewport_size({"width": width, "height": 800})
        assert plotted.evaluate(CUT) == []
    plotted.click(".chip:has-text('eval/reward')")
    plotted.focus("[aria-label='eval/reward by step'] >> [aria-label='step 1100: 0.5']")


def test_the_ledger_tells_what_steps_trained_from_what_none_took(page):
    card = page.locator("section", has=page.locator("h2:has-text('Ledger')"))
    rows = [row.split("\t")[:2] for row in card.locator("tbody").inner_text().split("\n")]
    summary = page.evaluate("fetch('./api/run').then((answer) => answer.json())")["summary"]
    assert ["trained", "62"] in rows
    assert ["to train", str(summary["ledger"]["trained"] - 62)] in rows


class TestFiveWalks:
    def test_to_the_session_that_was_judged_wrongly(self, page):
        walk(page, "text=fix-dates", "a:has-text('s-long')", "text=judgement")
        page.wait_for_selector("text=AssertionError")
        assert "The judge reward 0" in text(page)
        assert "+return text.split('.')" in text(page)

    def test_to_where_two_sessions_of_a_group_part(self, page):
        walk(page, "text=best and worst")
        page.wait_for_selector("h1:has-text('Where they part')")
        page.wait_for_selector("text=then in call s-good-1")
        assert "careful programmer" in text(page)
        walk(page, "text=call s-good-1")
        page.wait_for_selector("h1:has-text('call s-good-1')")

    def test_to_the_call_whose_prompt_was_rendered_and_why(self, page):
        walk(
            page,
            "bdi:text-is('rendered')",
            "a:has-text('s-long')",
            ".callblock:has-text('rendered') >> a",
        )
        page.wait_for_selector("text=First difference")
        assert f"Why it was rendered: {WHY}" in text(page)
        recorded, rendered = page.locator(".differs").all_inner_texts()
        assert recorded.startswith(": na")
        assert rendered.startswith(".<|im_end|>")

    def test_to_the_step_whose_weights_sampled_a_token(self, page):
        walk(
            page,
            "text=sessions",
            "a:has-text('s-good')",
            "bdi:text-is('s-good-1')",
            ".tokens .trained >> nth=3",
        )
        page.wait_for_selector(f".details:has-text('{OLD} (made by optimizer step 1)')")

    def test_to_the_tokens_that_were_left_out_by_reason(self, page):
        walk(
            page,
            "bdi:text-is('auxiliary')",
            "a:has-text('s-long')",
            "nav >> text=tokens",
            "bdi:text-is('s-long-4')",
        )
        page.wait_for_selector(".legend >> text=not trained: auxiliary")
        page.wait_for_selector(".tokens .v1 >> nth=5")


def test_a_steps_numbers_lead_to_its_sessions_and_their_trained_tokens(page):
    walk(page, "bdi:text-is('step 3')")
    page.wait_for_selector("h1:has-text('1 of 7 sessions')")
    walk(page, "a:has-text('s-good')", "bdi:text-is('s-good-1')")
    page.select_option(".select select", "difference")
    page.wait_for_selector(".tokens .p3")
    page.locator(".tokens .n3").first.click()
    page.wait_for_selector(".details:has-text('+1.4')")
    assert {"-0.2", "0.5", "+1.4", "step 3"} <= set(page.inner_text(".details").split("\n"))
    go(page, "#/sessions?left_out=no_signal")
    page.wait_for_selector("h1:has-text('1 of 7 sessions')")


OBSERVE = """() => new MutationObserver((changes) => changes.forEach((change) => change.addedNodes.forEach((node) => {
    if (node.matches?.('img, script') || node.querySelector?.('img, script')) window.hacked = 1;
}))).observe(document.body, { childList: true, subtree: true })"""


class TestAttacks:
    def test_a_session_changes_nothing_but_its_own_words(self, page):
        page.evaluate(OBSERVE)
        shown = ""
        go(page, "#/sessions?status=failed")
        page.locator("tr.link a").click()
        page.wait_for_selector(".callblock")
        for tab in ("conversation", "judgement", "tokens", "group", "events"):
            page.locator(f"nav >> text={tab}").first.click()
            page.wait_for_selector(f".tabs [aria-current]:has-text('{tab}')")
            shown += text(page)
        page.locator("bdi:text-is('../x?y-0')").first.click()
        page.wait_for_selector(".tokens")
        shown += text(page)
        go(page, "#/")
        page.wait_for_selector("text=Violations")
        shown += text(page)
        assert shown.count(ATTACK[:66]) > 10
        assert not {"\x1b", "\u202e", "\u202c"} & set(shown)
        assert "⟨U+202E⟩" in shown
        assert "␛[31mred" in shown
        assert page.evaluate("window.hacked") is None

    def test_a_strange_id_is_a_session_like_others(self, page):
        go(page, "#/sessions?q=onerror")
        page.locator("tr.link a").click()
        page.wait_for_selector(".callblock")
        assert page.evaluate("decodeURIComponent(location.hash)") == f"#/session/{STRANGE_ID}"
        assert ATTACK[:30] in text(page)


@pytest.fixture
def copy_of(open_page, served):
    """Return a function that opens the link of a page, and waits for an element."""

    def copy_of(page, selector):
        copy = open_page(served)
        go(copy, page.evaluate("location.hash"))
        copy.wait_for_selector(selector)
        return copy

    return copy_of


class TestLinks:
    def test_a_link_opens_what_was_seen(self, page, copy_of):
        go(page, "#/sessions")
        page.wait_for_selector("tr.link")
        page.select_option(".select:has-text('outcome') select", "completed")
        page.fill("[type=search]", "gemini")
        page.click("th >> text=reward")
        page.click("th >> text=session")
        page.click("th >> text=session")
        assert page.locator("tr.link a").all_inner_texts() == ["s-flat2", "s-flat1"]
        copy = copy_of(page, "tr.link")
        assert text(copy) == text(page)

    def test_a_link_opens_the_colour_and_the_token(self, page, copy_of):
        go(page, f"{LONG}/call/s-long-1")
        page.locator(".tokens .trained").nth(4).click()
        page.select_option(".select select", "log-probability")
        page.check("text=ids")
        page.wait_for_selector(".chosen sub")
        copy = copy_of(page, ".chosen sub")
        assert copy.inner_text(".details") == page.inner_text(".details")
        assert copy.inner_text(".legend") == page.inner_text(".legend")

    def test_toggles_and_lanes_are_in_the_link(self, page, copy_of):
        go(page, LONG)
        page.click("text=sub-agent 1")
        page.check("text=reasoning")
        page.wait_for_selector(".reasoning", state="detached")
        copy = copy_of(page, ".callblock")
        assert copy.locator(".callblock").count() == 2
        assert copy.locator(".reasoning").count() == 0


def test_the_keyboard_is_enough(page):
    keys = page.keyboard
    keys.press("g")
    keys.press("s")
    page.wait_for_selector("h1:has-text('of 7 sessions')")
    keys.press("/")
    page.wait_for_selector("[type=search]:focus")
    keys.type("fix-dates")
    page.wait_for_selector("h1:has-text('4 of 7 sessions')")
    for key in ("Escape", "j", "j", "k", "Enter"):
        keys.press(key)
    page.wait_for_selector("h1:has-text('s-long')")
    for key in ("j", "j", "Enter"):
        keys.press(key)
    page.wait_for_selector("h1:has-text('call s-long-1')")
    keys.press("]")
    page.wait_for_selector("h1:has-text('call s-long-2')")
    keys.press("[")
    page.wait_for_selector("h1:has-text('call s-long-1')")
    keys.press("c")
    page.wait_for_selector("text=not known")
    keys.press("ArrowRight")  # without a click
    keys.press("ArrowRight")
    page.wait_for_selector(".details:has-text('sampled 1')")
    keys.press("?")
    page.wait_for_selector("[role=dialog]")
    keys.press("Escape")
    page.wait_for_selector("[role=dialog]", state="hidden")


def test_bars_of_rewards_begin_and_end_with_the_range_of_a_judge_whatever_the_rewards_are(page):
    ask = "rows => import('./page/run.js').then(({ rewardRange }) => rewardRange(rows))"
    for rewards, expected in (([0.1, None, 0.2], [0, 1]), ([-1, 0.5], [-1, 1]), ([3.0], [0, 3])):
        assert page.evaluate(ask, [{"reward": reward} for reward in rewards]) == expected


def test_groups_with_a_signal_are_first(page):
    groups = page.locator("section", has=page.locator("h2:has-text('Groups')"))
    assert "g-dates" in groups.locator("tbody tr").first.inner_text()
    go(page, "#/sessions?show=groups")
    page.wait_for_selector("tr.heading")
    assert "g-dates" in page.locator("tr.heading").first.inner_text()


def test_the_columns_of_sessions_fit_1280_pixels_and_further_ones_are_chosen(page):
    page.set_viewport_size({"width": 1280, "height": 800})
    go(page, "#/sessions")
    page.wait_for_selector("tr.link")
    hidden = "(e => e.scrollWidth - e.clientWidth)(document.querySelector('main > .table'))"
    assert page.evaluate(hidden) == 0
    assert page.locator("th >> text=faults").count() == 0
    page.click("summary:has-text('columns')")
    page.check("text=faults")
    page.wait_for_selector("th >> text=faults")


def test_a_judges_evidence_names_the_tests_that_did_not_pass(page):
    go(page, f"{LONG}?tab=judgement")
    page.wait_for_selector("text=AssertionError")
    facts = page.inner_text("section:has-text('The judge') .facts")
    assert "1 failed, 1 passed" in facts
    assert "test_dates: failed" in facts
    assert "seconds: 3, status: 1" in facts
    assert "{" not in facts


def test_lanes_have_the_seconds_of_harness_and_phases_and_an_event_after_the_last_call(page):
    go(page, LONG)
    page.wait_for_selector(".lanes")
    assert "the harness alone: 0.00 s before its first call, 1.50 s after its last" in text(page)
    assert "queued 2.50 s, running 1 min 1 s" in text(page)
    marks = page.locator(".lanes text").evaluate_all(
        "all => all.map(e => parseFloat(e.getAttribute('x')))"
    )
    assert marks[-1] == 100
    assert 0 <= min(marks) <= max(marks[:-1]) < 100


def test_a_long_prompt_and_a_long_command_are_folded_until_they_are_opened(page):
    go(page, LONG)
    page.wait_for_selector(".callblock")
    folded = page.evaluate("document.querySelector('.folded')?.clientHeight")
    page.click("button:has-text('show all')")
    opened = page.locator("[aria-expanded=true] >> xpath=..").first
    assert opened.evaluate("each => each.clientHeight") > folded
    command = page.locator(".toolcall", has_text="sed -i")
    command.locator("button:has-text('show all: 21 lines')").click()
    assert command.locator(".folded").count() == 0


def test_each_view_has_its_title(page):
    for address, title in {
        "#/": "run · rolltap",
        "#/sessions": "sessions · run · rolltap",
        LONG: "s-long · run · rolltap",
        f"{LONG}/call/s-long-1": "call s-long-1 · s-long · run · rolltap",
        "#/compare?a=s-good&b=s-long": "s-good and s-long · run · rolltap",
    }.items():
        go(page, address)
        page.wait_for_function("title => document.title === title", arg=title)


def test_every_focus_is_seen(page):
    go(page, LONG)
    page.wait_for_selector(".callblock")
    for _ in range(12):
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_a_growing_run_shows_what_is_new_and_keeps_the_place(
    viewed_run, tmp_path, tokenizer, serve, open_page
):
    run = shutil.copytree(viewed_run, tmp_path / "run")
    page = open_page(serve(run))
    all_read(page)  # a row gets the numbers of its calls when they have been read
    go(page, "#/sessions")
    page.wait_for_selector("h1:has-text('of 7 sessions')")
    for key in ("j", "j", "j"):
        page.keyboard.press(key)
    chosen = page.evaluate("document.activeElement.innerText")
    grow(run, tokenizer, "s-new")
    page.wait_for_selector("h1:has-text('8 of 8 sessions')")
    assert page.evaluate("document.activeElement.innerText") == chosen
    page.wait_for_selector("tr:has-text('s-new')")


def test_thousands_of_sessions_are_drawn_as_they_are_scrolled_to(tmp_path, serve, open_page):
    number = 10_000 if DEEP else 2_000
    page = open_page(serve(many_sessions(tmp_path / "run", number)))
    go(page, "#/sessions?sort=session&down=1")
    page.wait_for_selector(f"text=s{number - 1:05}")
    assert page.locator("tr.link").count() < 200
    page.evaluate("document.querySelector('.table').scrollTop = 1e6")
    page.wait_for_selector("bdi:text-is('s00000')")


def test_without_a_tokenizer_ids_are_shown_and_it_says_why(tmp_path, viewed_run, serve, open_page):
    run = shutil.copytree(viewed_run, tmp_path / "run")
    metadata = (run / "run.json").read_text()
    (run / "run.json").write_text(metadata.replace('"model": "', '"model": "/nowhere'))
    page = open_page(serve(run))
    page.wait_for_selector("text=Tokens are shown as ids")
    go(page, f"{LONG}/call/s-long-1")
    page.wait_for_selector("text=tokenizer is not here")
    assert page.inner_text(".tokens .trained >> nth=3").strip().isdigit()


def test_one_file_has_the_same_views_without_a_server(viewed_run, tmp_path, open_page):
    file = tmp_path / "run.html"
    write_file(viewed_run, file, None, (), lambda *_: None)
    page = open_page(file.as_uri())
    open_views(page)
    go(page, f"{LONG}/call/s-long-7")
    page.wait_for_selector(".tokens .trained")
    assert "careful programmer" in page.inner_text(".tokens")
    page.keyboard.press("c")
    page.wait_for_selector("text=not known")


def test_rewards_of_an_evaluation_are_apart(viewed_run, tmp_path, serve, open_page):
    run = shutil.copytree(viewed_run, tmp_path / "run")
    shutil.copytree(viewed_run, run / "evaluation")
    page = open_page(serve(run))
    page.wait_for_selector("h1:has-text('7 sessions')")
    card = page.locator("section", has_text="rolltap view")
    assert card.locator("tbody tr").first.inner_text().split() == ["0a1b2c3d.1", "5", "0.5", "1"]
