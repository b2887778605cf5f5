import io
import json

from rich.console import Console

from rolltap.trainer.runs.views.calls import (
    CONTEXT_TOKENS,
    Divergence,
    completion,
    context,
    find_divergence,
    view_call,
)
from rolltap.trainer.runs.views.text import load_decoder
from tests.factories import make_call, says, write_run
from tests.trainer.runs.views.shown import call, printed


def as_json(run, *arguments):
    return json.loads(printed(run, "first", *arguments, "--json"))


def test_a_call_is_shown_with_decoded_tokens(small_run, tokenizer):
    text = printed(small_run, "first", "a1")
    for shown in ("user: Count [bold]them[/bold].", "default [0:2]", "bash"):
        assert shown in text
    assert f"4 44 {json.dumps(tokenizer.decode([44]), ensure_ascii=False)} -0.5\n" in text
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    terminal.print(view_call(small_run, "fi", "a1"))
    assert tokenizer.decode([43]) in terminal.file.getvalue()
    assert "position id text" not in terminal.file.getvalue()


def test_in_a_pipe_each_token_is_a_line_and_with_full_all_of_the_prompt_and_the_conversation(
    small_run,
):
    _, _, lines = printed(small_run, "first", "a2").partition("position id text logprob\n")
    tokens = [line.split(" ")[:2] for line in lines.splitlines()]
    assert tokens[:3] == [["5", "50"], ["6", "51"], ["7", "52"]]
    full = printed(small_run, "first", "a2", "--full")
    assert "\n0 40 " in full
    assert "user: Count [bold]them[/bold].\nassistant: I look" in full
    view = as_json(small_run, "a2", "--full")
    assert [message["role"] for message in view["call"]["messages"]] == ["user", "assistant"]
    assert view["previous"] == "a1"
    assert view["next"] == "b3"


def test_the_reply_is_shown_as_text_before_its_tokens(tmp_path):
    reply = json.dumps(json.loads(says("I count.", "wc -l")) | {"reasoning_content": "Lines."})
    lost = call(2, "a2", [1], [2], status="lost", reply=None)
    write_run(tmp_path, call(1, "a1", [1], [2], reply=reply), lost)
    text = printed(tmp_path, "first", "a1")
    parts = ["─ reply ─", "assistant: Lines.", "I count.", "wc -l", "─ tokens ─"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "─ reply ─" not in printed(tmp_path, "first", "a2")


def test_without_the_tokenizer_ids_are_shown(tmp_path):
    write_run(tmp_path, call(1, "a1", [1], [43, 44]), model=str(tmp_path / "gone"))
    assert load_decoder(tmp_path) is None
    text = printed(tmp_path, "first", "a1")
    assert "1 43 - -0.5\n2 44 - -0.5\n" in text
    assert "the tokenizer of the run's model is not on this machine" in text


def test_new_prompt_tokens_are_shown_before_the_sampled_ones_without_a_colour():
    continued = call(2, "b", range(100, 400), [5], parent=call(1, "a", [1], [2]))
    shown = context(continued, None, 302 - CONTEXT_TOKENS)
    assert shown.plain.startswith(f"({300 - CONTEXT_TOKENS} tokens) … {400 - CONTEXT_TOKENS} ")
    assert shown.plain.endswith(" 399 ")
    assert {span.style for span in shown.spans} | {shown.style} == {"dim", "dim italic"}


def test_a_token_has_the_colour_of_its_log_probability():
    shown = completion(call(1, "a", [1], [2, 3, 4], logprobs=[-0.01, -2.0]), None)
    colours = {shown.plain[span.start : span.end]: span.style for span in shown.spans}
    assert colours == {"2 ": "green", "3 ": "dark_orange"}
    assert shown.plain == "2 3 4 "


def test_a_rendered_call_shows_where_it_leaves_the_recorded_tokens(small_run):
    difference = view_call(small_run, "first", "b4").difference
    assert difference == Divergence("b3", 4, [40, 41, 42, 43], [44, 50, 51, 52, 60, 61], [99, 98])
    text = printed(small_run, "first", "b4")
    assert "2 earlier calls fit equally well up to message 3" in text
    assert "The prompt agrees with call b3 up to token 4." in text
    assert as_json(small_run, "b4")["difference"]["position"] == 4


def test_the_earlier_call_with_the_longest_common_prefix_is_compared():
    near = call(1, "near", [1, 2, 3], [4, 5])
    far = call(2, "far", [1, 9], [4])
    aborted = call(2, "aborted", [1, 2, 3, 4, 5, 6], [7], status="aborted")
    rendered = call(3, "r", [1, 2, 3, 4, 6], [7], kind="rendered")
    late = call(4, "late", [1, 2, 3, 4, 5, 6], [7])
    difference = find_divergence(rendered, [near, far, aborted, rendered, late])
    assert difference == Divergence("near", 4, [1, 2, 3, 4], [5], [6])
    assert find_divergence(near, [near, rendered]) is None
    earlier = call(1, "a", [1], [2])
    difference = find_divergence(rendered, [earlier, rendered])
    assert difference == Divergence("a", 2, [1, 2], [], [3, 4, 6])


def test_as_json_the_json_columns_of_the_row_are_parsed(small_run):
    view = as_json(small_run, "a1")
    assert view["call"]["messages"][0]["role"] == "user"
    assert view["call"]["reply"]["content"] == "I look\nat it."
    assert view["call"]["tools"][0]["function"]["name"] == "bash"
    assert view["call"]["prompt_ids"] == [40, 41, 42]
    assert view["difference"] is view["previous"] is None
    assert as_json(small_run, "b5")["left_out"] == "violation"
    assert "not trained: violation" in printed(small_run, "first", "b5")


def test_as_json_a_non_finite_log_probability_is_its_name(tmp_path):
    nowhere = make_call("a", completion_ids=[2, 3], logprobs=[float("nan"), float("-inf")])
    write_run(tmp_path, nowhere)
    view = json.loads(printed(tmp_path, "s", "a", "--json"))
    assert view["call"]["logprobs"] == ["NaN", "-Infinity"]
