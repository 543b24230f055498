"""Models with sliding windows and recurrent states through new weights, sleep and restarts, and with rounded states."""

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import make_checkpoint, reference_logits
from tests.helpers.engines import make_engine, prompt_of
from tests.helpers.faulty_connector import OFFLOADING, Faults, faulty
from tests.helpers.paged_models import MODELS as PAGED

from fleetfoot import LLMEngine, RequestOutput, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.utils.validation import FieldError

VOCAB = 101
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "head_dim": 16, "max_position_embeddings": 512}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
GEMMA = {"sliding_window": 5, **ALTERNATING, "query_pre_attn_scalar": 16}
MODELS: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "mistral": ("mistral", {"sliding_window": 7}, "v1", 56),
    "gemma3": ("gemma3_text", GEMMA, "v2", 280),
    "lfm2": (*PAGED["lfm2"], "v1", 120),
    "qwen3-next": (*PAGED["qwen3-next"], "v2", 20),
}
"""Model type, fields, runner and slabs: layers with windows alone, beside others, and two kinds of states."""
PROMPTS = [prompt_of(length, VOCAB, seed=length) for length in (3, 61, 40, 9, 24)]
PROMPTS += [PROMPTS[1][:48] + prompt_of(7, VOCAB, seed=1), PROMPTS[1]]  # of which a prefix is cached
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 4}
Outputs = list[list[int]]


def assert_greedy(reference: Any, outputs: Outputs) -> None:
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        assert len(tokens) == PARAMS.max_tokens
        logits = reference_logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


def run(engine: LLMEngine) -> list[list[int]]:
    """All prompts, half of them first; tokens of each."""
    outputs: dict[str, RequestOutput] = {}
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, PARAMS)
        for _ in range(4 * (number % 3)):
            outputs |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    engine.core.scheduler.check_idle()
    return [list(outputs[str(number)].outputs[0].token_ids) for number in range(len(PROMPTS))]


def test_states_in_two_bytes(tmp_path: Path) -> None:
    """Rounded states have the same tokens on both runners, in batches and with prefix hits."""
    kind, fields = PAGED["qwen3-next"]
    reference = make_checkpoint(tmp_path, kind, **{**SIZES, **fields})
    outputs, fingerprints = [], set()
    for runner, dtype in (("v2", "float32"), ("v1", "bfloat16"), ("v2", "bfloat16")):
        engine = make_engine(tmp_path, model_runner=runner, mamba_ssm_cache_dtype=dtype, **SETTINGS)
        outputs += [run(engine), run(engine)]
        layout = engine.core.executor.layout
        fingerprints.add((layout.fingerprint, layout.group_bytes[-1]))
        engine.shutdown()
    expected, again, *rounded = outputs
    assert_greedy(reference, expected)
    assert again == expected
    # a prompt that is computed at once has no rounded state: which chunks there are decides near-ties
    same = [sum(one == other for one, other in zip(tokens, expected, strict=True)) for tokens in rounded]
    assert min(same) >= len(PROMPTS) - 2
    (_, small), (_, large) = sorted(fingerprints, key=lambda found: found[1])
    assert small < 0.75 * large


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("story", "max_state_snapshots", 4),
        ("story", "mamba_ssm_cache_dtype", "bfloat16"),
        ("lfm2", "mamba_ssm_cache_dtype", "bfloat16"),  # its states have no matrices
    ],
)
def test_settings_of_states_that_are_not_there(name: str, field: str, value: Any, tmp_path: Path) -> None:
    folder = embedded_model_path() if name == "story" else tmp_path
    if name != "story":
        make_checkpoint(folder, PAGED[name][0], **{**SIZES, **PAGED[name][1]})
    with pytest.raises(FieldError) as caught:
        make_engine(folder, **{**SETTINGS, field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize("name", MODELS)
def test_new_weights_sleep_and_restarts(name: str, tmp_path: Path) -> None:
    """KV in host memory, of every group, is that of the weights in use, before and after all of these."""
    kind, fields, runner, num_slabs = MODELS[name]
    reference, faults = make_checkpoint(tmp_path, kind, **{**SIZES, **fields}), Faults()
    engine = make_engine(
        tmp_path,
        model_runner=runner,
        kv_transfer_config=faulty(OFFLOADING, faults),
        on_error="restart",
        enable_sleep_mode=True,
        num_gpu_blocks_override=num_slabs,
        **SETTINGS,
    )
    try:
        assert_greedy(reference, expected := run(engine))
        engine.reload_weights()
        assert run(engine) == expected
        engine.reset_prefix_cache()
        engine.sleep(level=1)
        engine.wake_up()
        loaded = engine.stats().scheduler.transfers.tokens_loaded
        assert run(engine) == expected
        assert engine.stats().scheduler.transfers.tokens_loaded > loaded
        faults.raise_at, faults.on_call = "save_kv", faults.calls.count("save_kv") + 6
        assert run(engine) == expected
        assert engine.stats().num_restarts == 1
        assert engine.collective_rpc("weights_identity")
    finally:
        engine.shutdown()
