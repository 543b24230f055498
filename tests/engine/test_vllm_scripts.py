"""Scripts of vLLM's with the import changed: their names, what they call and what they read."""

import asyncio

import pytest
from fleetfoot.platforms import current_platform
from fleetfoot.v1.engine.async_llm import AsyncLLM

from fleetfoot import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from fleetfoot.distributed import cleanup_dist_env_and_memory
from fleetfoot.sampling_params import RequestOutputKind
from fleetfoot.utils.network_utils import get_open_port

PROMPT = "Once upon a time"
PARAMS = SamplingParams(temperature=0, max_tokens=6)


def test_an_engine_from_arguments() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(device="cpu", max_num_seqs=2))
    engine.add_request("a", PROMPT, PARAMS, lora_request=None, trace_headers=None)
    with pytest.raises(TypeError, match="add_request got an unknown keyword 'lora_request'; LoRA adapters"):
        engine.add_request("b", PROMPT, PARAMS, lora_request=1)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    engine.shutdown()
    with LLM.from_engine_args(EngineArgs(device="cpu", max_num_seqs=3)) as llm:
        assert llm.config.max_num_seqs == 3
        (expected,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [expected.outputs[0].text]


def test_an_asynchronous_engine_from_arguments() -> None:
    async def run() -> list[str]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(device="cpu", max_num_seqs=2), stat_loggers=None)
        params = SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.DELTA)
        try:
            with pytest.raises(TypeError, match="generate got an unknown keyword 'data_parallel_rank'; leave"):
                await anext(engine.generate(PROMPT, params, "1", data_parallel_rank=1))
            deltas = engine.generate(request_id="2", prompt=PROMPT, sampling_params=params, lora_request=None)
            return [completion.text async for output in deltas for completion in output.outputs]
        finally:
            engine.shutdown()

    with LLM(device="cpu", max_num_seqs=2) as llm:
        (expected,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    assert "".join(asyncio.run(run())) == expected.outputs[0].text


def test_names_of_the_machine() -> None:
    assert not current_platform.is_rocm() and current_platform.is_cpu() is not current_platform.is_cuda()
    assert 0 < get_open_port() < 65536
    cleanup_dist_env_and_memory()
