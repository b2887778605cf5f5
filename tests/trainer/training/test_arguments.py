"""Arguments of a recipe for TRL, PEFT and the recorder; its adapter, checkpoints and reporters."""

import json

import pytest
from peft import get_peft_model

from rolltap.addons.errors import InputError
from rolltap.addons.options import NEUTRAL_SAMPLING
from rolltap.trainer.training import arguments
from rolltap.trainer.training.arguments import (
    CHECKPOINTS,
    check_arguments,
    last_checkpoint,
    lora_config,
    remove_incomplete,
    require_servable,
    sampling,
    training_arguments,
)
from rolltap.trainer.training.recipe import Recipe, load_recipe
from tests.trainer.training.step.small_models import configuration
from tests.trainer.training.step.tiny import tiny_model
from tests.trainer.training.test_loop import write_recipe


class TestArguments:
    @pytest.fixture
    def arguments(self, tmp_path):
        def arguments(text, **values):
            recipe = load_recipe(write_recipe(tmp_path, text, **values))
            return training_arguments(recipe, tmp_path, 3)

        return arguments

    def test_the_recipes_table_has_trls_names_and_the_rest_is_derived(self, arguments, tmp_path):
        args = arguments("[grpo]\nlearning_rate = 0.5\nnum_iterations = 2\n", steps=3, sessions=4)
        assert (args.learning_rate, args.max_steps, args.seed) == (0.5, 6, 3)
        assert args.output_dir == str(tmp_path / CHECKPOINTS)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "[grpo]\nlearning_rate = -1\n",
                r"grpo\.learning_rate = -1: Input should be greater than 0",
            ),
            ("[grpo]\nadam_beta1 = 2\n", r"grpo\..*adam_beta1 = 2.*: Invalid beta parameter"),
        ],
    )
    def test_invalid_arguments_are_refused(self, arguments, text, message):
        with pytest.raises(InputError, match=message):
            arguments(text)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("excluded", "left"),
    [(None, {"q_proj", "v_proj"}), (["v_proj"], {"q_proj"}), (r".*\.v_proj", {"q_proj"})],
)
def test_an_adapter_leaves_out_frozen_towers_and_what_the_recipe_leaves_out(
    monkeypatch, excluded, left
):

    def frozen(model):
        return [name for name, _ in model.named_modules() if name.startswith("model.layers.0")]

    monkeypatch.setattr(arguments, "frozen_modules", frozen)
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"], "exclude_modules": excluded}
    model = get_peft_model(
        tiny_model(), lora_config(Recipe(model="m", steps=1, lora=lora), tiny_model())
    )
    adapted = {
        name.partition("layers.")[2] for name, _ in model.named_modules() if name.endswith("lora_A")
    }
    assert adapted == {f"1.self_attn.{name}.lora_A" for name in left}


class TestSampling:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", {}),
            ("[grpo]\ntemperature = 0.7\n", {"temperature": 0.7}),
            ("[recorder]\nrolltap_sampling = '{\"max_tokens\": 5}'\n", {"max_tokens": 5}),
            ('[recorder]\nrolltap_sampling = \'{"top_p": 1, "top_k": -1}\'\n', {"top_k": -1}),
        ],
    )
    def test_the_engine_samples_at_the_trainers_temperature_and_else_neutrally(
        self, tmp_path, text, expected
    ):
        assert sampling(load_recipe(write_recipe(tmp_path, text))) == NEUTRAL_SAMPLING | expected

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            *(
                ("top_p", 0.5),
                ("top_k", 20),
                ("min_p", 0.05),
                ("presence_penalty", 0.1),
                ("frequency_penalty", 0.1),
            ),
            *(("repetition_penalty", 1.1), ("seed", 0)),
        ],
    )
    def test_what_would_bias_the_loss_is_refused_with_key_value_and_fix(self, tmp_path, key, value):
        text = f"[recorder]\nrolltap_sampling = '{json.dumps({key: value})}'\n"
        message = rf"rolltap_sampling samples with {key} = {value}: .* that are trained; remove it$"
        with pytest.raises(InputError, match=message):
            sampling(load_recipe(write_recipe(tmp_path, text)))

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (
                "'{\"temperature\": 0.6}'",
                r"samples at temperature 0\.6, but grpo\.temperature is 0\.7",
            ),
            *(
                (value, r"recorder\.rolltap_sampling")
                for value in ("'[]'", "'null'", "'1'", '["{}"]', "'{'")
            ),
        ],
    )
    def test_two_temperatures_and_what_is_not_one_json_object_are_refused(
        self, tmp_path, value, message
    ):
        path = write_recipe(
            tmp_path, f"[grpo]\ntemperature = 0.7\n[recorder]\nrolltap_sampling = {value}\n"
        )
        with pytest.raises(InputError, match=message):
            sampling(load_recipe(path))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


class TestChecks:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "[grpo]\nmax_steps = 1\n",
                r"grpo\.max_steps = 1 does nothing here: write the recipe's key steps",
            ),
            (
                "[grpo]\nnum_generations = 8\n",
                r"grpo\.num_generations = 8 does .*: write the recipe's key sessions",
            ),
            (
                "[grpo]\nmax_completion_length = 9\n",
                r"has no effect without .*max_tokens of recorder\.rolltap_sampling",
            ),
            (
                "[grpo]\nmax_prompt_length = 9\n",
                r"does nothing here: the longest reply is max_tokens of",
            ),
            (
                "[grpo]\nuse_vllm = false\n",
                r"grpo\.use_vllm = False: the traces are sampled already",
            ),
            (
                '[grpo]\ntemperature = "1.0"\n',
                "grpo.temperature = '1.0': Input should be a valid number",
            ),
            ("[grpo]\nbeta = true\n", "grpo.beta = True: Input should be a valid number"),
            (
                "[grpo]\nbf16 = true\n",
                "grpo.bf16 = True does nothing here: write the recipe's key dtype",
            ),
            (
                '[grpo]\nreport_to = "pencil"\n',
                "grpo.report_to = 'pencil': pencil is not supported",
            ),
            (
                "[grpo]\nmodel_init_kwargs = {dtype = 'float32'}\n",
                "model_init_kwargs.dtype: set `dtype`",
            ),
            (
                "[grpo]\nmodel_init_kwargs = 1\n",
                "grpo.model_init_kwargs = 1: Input should be a valid dictionary",
            ),
            (
                "[grpo]\nddp_backend = 'mpi'\n",
                r"grpo\.ddp_backend = 'mpi': processes average their gradients",
            ),
            (
                "[grpo]\nfp16 = true\n",
                r"grpo\.fp16 = True does .*: write the recipe's key dtype: bfloat16 \(bf16\)",
            ),
            (
                "[lora]\nrr = 8\n",
                r"lora\.rr = 8 is no argument of LoraConfig: write lora\.r, or remove it",
            ),
            (
                "[lora]\nwhat = 8\n",
                r"lora\.what = 8 is no argument of LoraConfig: correct or remove it",
            ),
            (
                "[grpo]\nlearning_rat = 1\n",
                (
                    r"grpo\.learning_rat = 1 is no argument of TraceGRPOConfig: write"
                    r" grpo\.learning_rate, or remove it"
                ),
            ),
            ('[lora]\nr = "8"\n', r"lora\.r = '8': Input should be a valid integer"),
            (
                '[lora]\nbias = "some"\n',
                r"lora\.bias = 'some': Input should be 'none', 'all' or 'lora_only'",
            ),
            (
                '[lora]\ninit_lora_weights = "gausian"\n',
                r"lora\.init_lora_weights = 'gausian': Input should be",
            ),
            *(
                (
                    f'[lora]\ninit_lora_weights = "{init}"\n',
                    rf"lora\.init_lora_weights = '{init}' needs a pass over data",
                )
                for init in ("corda", "eva", "lora_ga")
            ),
            (
                '[lora]\ninit_lora_weights = "PiSSA"\n',
                r"lora\.init_lora_weights = 'PiSSA': Input should be",
            ),
            (
                '[lora]\ninit_lora_weights = "pissa_niter_x"\n',
                r"lora\.init_lora_weights = 'pissa_niter_x': Input",
            ),
            (
                '[lora]\ntarget_modules = ["lm_head"]\n',
                r"lora\.target_modules has the output embeddings.*: remove it",
            ),
            *(
                (f"[grpo]\nbeta = 0.1\n[lora]\ntarget_modules = ['q_proj']\n{text}\n", message)
                for text, message in (
                    (
                        "bias = 'all'",
                        (
                            r"beta = 0\.1: with lora\.bias = 'all', the model without its adapter"
                            r" is not"
                        ),
                    ),
                    ("bias = 'lora_only'", r"beta = 0\.1: with lora\.bias = 'lora_only'"),
                    (
                        "init_lora_weights = 'pissa'",
                        r"beta = 0\.1: with lora\.init_lora_weights = 'pissa'",
                    ),
                    (
                        "init_lora_weights = 'pissa_niter_4'",
                        r"with lora\.init_lora_weights = 'pissa_niter_4'",
                    ),
                    (
                        "init_lora_weights = 'olora'",
                        r"beta = 0\.1: with lora\.init_lora_weights = 'olora'",
                    ),
                )
            ),
            (
                "[lora]\nalora_invocation_tokens = [1]\n",
                r"lora\.alora_invocation_tokens: .* cannot be merged",
            ),
            (
                '[lora]\ntarget_modules = "("\n',
                r"lora\.target_modules = '\(' does not fit .*: missing \)",
            ),
            (
                '[lora]\nrank_pattern = {q_proj = "x"}\n',
                r"lora\.rank_pattern = {'q_proj': 'x'} does not fit the model",
            ),
            (
                "[lora]\nmegatron_config = {a = 1}\n",
                r"lora\.megatron_config = .*: No module named 'megatron'",
            ),
            (
                "[lora]\nr = 0\n",
                r"lora\.r = 0 does not fit the model .*: `r` should be a positive integer",
            ),
            (
                '[lora]\ntarget_modules = ["nope"]\n',
                r"lora\.target_modules = \['nope'\] does not fit .* not found",
            ),
        ],
    )
    def test_a_value_that_cannot_be_trained_with_is_named_with_its_key(
        self, tmp_path, model, text, message
    ):
        recipe = load_recipe(write_recipe(tmp_path, text, model=str(model)))
        with pytest.raises(InputError, match=message):
            check_arguments(recipe)

    @pytest.mark.parametrize(
        "text",
        [
            (
                "[grpo]\nlearning_rate = 1\nscale_rewards = false\noptim = 'sgd'\nreport_to ="
                " ['none']\n"
            ),
            (
                "[grpo]\noffload_checkpoints = true\nmodel_init_kwargs = {attn_implementation ="
                " 'eager'}\n"
            ),
            "[lora]\nr = 2\ntarget_modules = 'all-linear'\ninit_lora_weights = 'pissa_niter_16'\n",
            (
                "[grpo]\nbeta = 0.1\n[lora]\nr = 2\ntarget_modules = ['q_proj']\ninit_lora_weights"
                " = 'gaussian'\n"
            ),
            "[lora]\nr = 2\ntarget_modules = ['q_proj']\nmodules_to_save = ['embed_tokens']\n",
        ],
    )
    def test_values_that_trl_and_peft_take_are_accepted(self, tmp_path, model, text):
        recipe = load_recipe(write_recipe(tmp_path, text, model=str(model)))
        check_arguments(recipe)
        training_arguments(recipe, tmp_path, 0)

    def test_a_folder_without_a_model_is_named(self, tmp_path):
        for folder in ("/nope", str(tmp_path)):
            with pytest.raises(
                InputError, match=rf"model: the folder {folder} has no config\.json"
            ):
                check_arguments(load_recipe(write_recipe(tmp_path, model=folder)))


UNSERVED = {
    "use_dora": [True],
    "bias": ["all", "lora_only"],
    "lora_bias": [True],
    "modules_to_save": [["embed_tokens"]],
    "trainable_token_indices": [[3]],
    "layer_replication": [[[0, 1]]],
    "alora_invocation_tokens": [[3]],
    "use_bdlora": [{"target_modules_bd_a": []}],
    "use_qalora": [True],
    "r": [513],
    "rank_pattern": [{"q_proj": 513}],
    "init_lora_weights": ["pissa", "pissa_niter_16", "olora", "corda", "loftq"],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in UNSERVED.items() for value in values]
)
def test_an_adapter_that_vllm_does_not_serve_is_named_with_its_key(key, value):
    message = rf'^vLLM does not serve .* lora\.{key} = .*: .*, or set publish = "checkpoint"$'
    with pytest.raises(InputError, match=message):
        require_servable({key: value})


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {
            "r": 512,
            "rank_pattern": {"q_proj": 512},
            "bias": "none",
            "use_dora": False,
            "use_rslora": True,
        },
        {
            "modules_to_save": None,
            "layer_replication": None,
            "target_modules": "all-linear",
            "exclude_modules": ["x"],
        },
        *({"init_lora_weights": init} for init in (True, False, "gaussian", "mica", "orthogonal")),
    ],
    ids=str,
)
def test_other_adapters_are_served(lora):
    require_servable(lora)


def test_a_start_refuses_it_only_where_adapters_are_published(tmp_path, model):
    text = '[lora]\nr = 2\ntarget_modules = ["q_proj"]\nuse_dora = true\n'
    check_arguments(load_recipe(write_recipe(tmp_path, text, model=str(model))))
    with pytest.raises(
        InputError, match=r"vLLM does not serve an adapter with lora\.use_dora = True: leave it out"
    ):
        check_arguments(load_recipe(write_recipe(tmp_path, text, model=str(model), publish="lora")))


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
def test_a_start_refuses_to_publish_adapters_on_experts(tmp_path):
    configuration("qwen3-moe").save_pretrained(tmp_path / "moe")
    for text in (
        "target_modules = 'all-linear'\n",
        "target_parameters = ['mlp.experts.down_proj']\n",
    ):
        values = {"text": "[lora]\nr = 2\n" + text, "model": str(tmp_path / "moe")}
        check_arguments(load_recipe(write_recipe(tmp_path, **values)))
        with pytest.raises(InputError, match=r'adapter on parameters.*, or publish = "checkpoint"'):
            check_arguments(load_recipe(write_recipe(tmp_path, **values, publish="lora")))


@pytest.mark.parametrize("grpo", ["", "[grpo]\nforward = 'padded'\n"])
def test_a_start_refuses_positions_that_depend_on_the_longest_row(tmp_path, grpo):
    model = tiny_model(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    )
    model.config.save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="rope_type = 'dynamic'"):
        check_arguments(load_recipe(write_recipe(tmp_path, grpo, model=str(tmp_path / "model"))))


def test_incomplete_checkpoints_are_skipped_and_removed_and_whole_ones_stay(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step, state in [(2, "{}"), (9, "{}"), (10, '{"global'), (11, None), (12, "")]:
        (checkpoint := tmp_path / f"checkpoint-{step}").mkdir()
        if state is not None:
            (checkpoint / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    remove_incomplete(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-9"}
