"""Models with sliding windows and recurrent states through new weights, sleep and restarts, and with rounded states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import make_engine, prompt_of
from tests.helpers.faulty_connector import OFFLOADING, Faults, faulty
from tests.helpers.paged_models import MODELS as PAGED

from fleetfoot import LLMEngine, RequestOutput, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.utils.validation import FieldError

VOCAB = 101
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "head_dim": 16, "max_position_embeddings": 512}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 7}),
    "gemma3": ("gemma3_text", {"sliding_window": 5, **ALTERNATING, "query_pre_attn_scalar": 16}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 20, **ALTERNATING}),
    **{name: PAGED[name] for name in ("lfm2", "qwen3-next")},
}
STATES = {"lfm2", "qwen3-next"}
"""Models whose prefixes have recurrent states."""
TIGHT = {"mistral": 14, "gemma3": 70, "qwen3": 70, "lfm2": 30, "qwen3-next": 5}
"""Slabs of "tight": requests with a layer that attends to all tokens are preempted."""
PROMPTS = [prompt_of(length, VOCAB, seed=length) for length in (3, 61, 40, 9, 24)]
PROMPTS += [PROMPTS[1][:48] + prompt_of(7, VOCAB, seed=1), PROMPTS[1]]  # of which a prefix is cached
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[list[int]]]:
    """Its name, a checkpoint, and the greedy outputs of its reference."""
    kind, config = MODELS[request.param]
    folder = tmp_path_factory.mktemp(kind)
    reference = make_checkpoint(folder, kind, **{**SIZES, **config})
    outputs = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(PARAMS.max_tokens or 0):
            with torch.no_grad():
                tokens.append(int(reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        outputs.append(tokens[len(prompt) :])
    return request.param, folder, outputs


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


def test_states_in_two_bytes(model: tuple[str, Path, list[list[int]]]) -> None:
    """Rounded states have the same tokens on both runners, in batches and with prefix hits; models without matrices in
    their states refuse the setting."""
    name, folder, expected = model
    with pytest.raises(FieldError) as caught:
        make_engine(embedded_model_path(), max_state_snapshots=4)  # it has no states
    assert (caught.value.field, caught.value.value) == ("max_state_snapshots", 4)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 4, "mamba_ssm_cache_dtype": "bfloat16"}
    if name != "qwen3-next":
        with pytest.raises(FieldError) as caught:
            make_engine(folder, **settings)
        assert (caught.value.field, caught.value.value) == ("mamba_ssm_cache_dtype", "bfloat16")
        return
    outputs, fingerprints = [], set()
    for runner, dtype in (("v1", "bfloat16"), ("v2", "bfloat16"), ("v2", "float32")):
        engine = make_engine(folder, model_runner=runner, **{**settings, "mamba_ssm_cache_dtype": dtype})
        outputs += [run(engine), run(engine)]
        layout = engine.core.executor.layout
        fingerprints.add((layout.fingerprint, layout.group_bytes[-1]))
        engine.shutdown()
    # a prompt that is computed at once has no rounded state: which chunks there are decides near-ties
    same = [sum(one == other for one, other in zip(tokens, expected, strict=True)) for tokens in outputs]
    assert min(same[:4]) >= len(PROMPTS) - 2 and same[4:] == [len(PROMPTS)] * 2
    (_, small), (_, large) = sorted(fingerprints, key=lambda found: found[1])
    assert small < 0.75 * large


def test_new_weights_sleep_and_restarts(model: tuple[str, Path, list[list[int]]]) -> None:
    """KV in host memory, of every group, is that of the weights in use, before and after all of these."""
    name, folder, expected = model
    faults = Faults()
    engine = make_engine(
        folder,
        model_runner="v1" if name == "gemma3" else "v2",
        kv_transfer_config=faulty(OFFLOADING, faults),
        on_error="restart",
        enable_sleep_mode=True,
        skip_tokenizer_init=True,
        block_size=4,
        num_gpu_blocks_override=4 * TIGHT[name],
    )
    try:
        assert run(engine) == expected
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


def test_a_drafter_joins_the_first_group(pytestconfig: pytest.Config) -> None:
    """Of a target with windows alone: its first group then has layers. The tokens are those without drafts."""
    assets = pytestconfig.rootpath / "tests" / "assets"
    drafts = {"method": "draft_model", "model": str(assets / "story-draft"), "num_speculative_tokens": 3}
    found = []
    for speculative, has_layers in ((None, False), (drafts, True)):
        options = {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 40, "skip_tokenizer_init": True}
        engine = make_engine(assets / "story-mistral", speculative_config=speculative, **options)
        assert [group.has_layers for group in engine.core.scheduler.config.groups] == [has_layers, True]
        found.append(run(engine))
        engine.shutdown()
    assert found[0] == found[1]
