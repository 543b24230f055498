"""Sleep on a GPU: memory returns to the driver, addresses and graphs stay, and tokens are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.engines import make_engine, prompt_of, run_requests

from fleetfoot import SamplingParams
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.native.loading import native_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(bool(native_problem()), reason="needs the C library"),
]

ASSETS = Path(__file__).parent.parent / "assets"
VOCAB = 2048
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
REQUESTS = {str(seed): (prompt_of(20 + 9 * seed, VOCAB, seed=seed), PARAMS) for seed in range(6)}
MIB = 1 << 20
DRAFTS = {"method": "draft_model", "model": str(ASSETS / "story-draft"), "num_speculative_tokens": 3}


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def tokens(engine: LLMEngine) -> list[list[int]]:
    outputs = run_requests(engine, REQUESTS)
    return [outputs[name].outputs[0].token_ids for name in REQUESTS]


def places(engine: LLMEngine) -> tuple[list[int], list[Any]]:
    runner = engine.core.executor.runner  # type: ignore[attr-defined]
    return [kv_cache.data_ptr() for kv_cache in runner._kv_caches], runner.weights.stored()


@pytest.mark.alone
@pytest.mark.parametrize(
    "settings", [{"model_runner": "v1"}, {"model_runner": "v2"}, {"speculative_config": DRAFTS}], ids=str
)
def test_memory_returns_and_graphs_stay_valid(settings: dict[str, Any]) -> None:
    engine = make_engine(
        ASSETS / "story-qwen3", device="cuda", max_model_len=256, skip_tokenizer_init=True, enable_sleep_mode=True,
        num_gpu_blocks_override=320_000, enable_prefix_caching=False, dtype="float32", **settings,
    )  # fmt: skip
    kv_cache = engine.plan.memory.kv_cache
    assert kv_cache > 4096 * MIB  # what else changes must be small beside it
    tokens(engine)
    expected, where = tokens(engine), places(engine)
    graphs = getattr(engine.core.executor.runner, "graphs", None)  # type: ignore[attr-defined]
    captured = {} if graphs is None else dict(graphs.captured)
    for level in (1, 2, 1):
        awake = used()
        engine.sleep(level=level)
        assert awake - used() > kv_cache / 2
        other = torch.full((128 * MIB,), 255, dtype=torch.uint8, device="cuda")  # in pages that were KV
        del other
        torch.cuda.empty_cache()
        engine.wake_up(tags=["weights"])
        engine.wake_up(tags=["kv_cache"])
        assert places(engine) == where
        assert tokens(engine) == expected
        assert graphs is None or captured == graphs.captured
        assert abs(used() - awake) < kv_cache / 2
    engine.sleep()
    free, _ = torch.cuda.mem_get_info()
    other = torch.empty(free - kv_cache // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="no memory for kv_cache"):
        engine.wake_up()
    torch.cuda.synchronize()  # nothing is written to pages that were given back
    del other
    torch.cuda.empty_cache()
    engine.wake_up()
    assert tokens(engine) == expected
    engine.shutdown()
