"""Embeddings and scores, held against transformers and the definitions of sentence-transformers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, LlamaConfig, MistralConfig, Qwen3Config

from fleetfoot import LLM, AsyncLLM, PoolingParams, SamplingParams
from fleetfoot.tokenizer.tokenizer import Tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2,
    "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen3": Qwen3Config}
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "block_size": 4, "num_gpu_blocks_override": 128,
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(1, 100, (size,), generator=GENERATOR).tolist() for size in (1, 3, 17, 40, 8)]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks and preemption": {"max_num_batched_tokens": 16, "max_num_seqs": 3, "num_gpu_blocks_override": 14},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16, "max_num_seqs": 4},
}


def save(folder: Path, kind: str, cls: Any, **more: Any) -> Any:
    torch.manual_seed(3)
    model = cls.from_config(CONFIGS[kind](**SHAPE, **more), attn_implementation="eager").float().eval()
    model.save_pretrained(folder)
    return model


def with_modules(folder: Path, mode: str, *, normalize: bool) -> None:
    """The files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in zip(paths, kinds, strict=False)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))


def ids(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def states(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt])).last_hidden_state[0]


POOL: dict[str, Any] = {
    "lasttoken": lambda hidden: hidden[-1], "mean_tokens": lambda hidden: hidden.mean(0),
    "cls_token": lambda hidden: hidden[0],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", POOL)
def test_embeddings(mode: str, way: str, tmp_path: Path) -> None:
    kind = {"lasttoken": "qwen3", "mean_tokens": "llama", "cls_token": "mistral"}[mode]
    model = save(tmp_path, kind, AutoModel)
    with_modules(tmp_path, mode, normalize=mode != "cls_token")
    expected = [POOL[mode](states(model, prompt)) for prompt in PROMPTS]
    if mode != "cls_token":
        expected = [vector / vector.norm() for vector in expected]
    with LLM(tmp_path, **SETTINGS | WAYS[way]) as llm:
        assert llm.llm_engine.runner_name == "v1"
        for _ in range(2):  # then with cached prefixes
            outputs = llm.embed(ids(PROMPTS), use_tqdm=False)
            for output, vector in zip(outputs, expected, strict=True):
                torch.testing.assert_close(torch.tensor(output.outputs.embedding), vector, rtol=1e-4, atol=1e-5)
        assert (outputs[3].num_cached_tokens > 0) == (mode == "lasttoken")
        llm.llm_engine.check_integrity()


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("way", ["plain", "tensor parallel", "pipeline"])
def test_classes(num_labels: int, way: str, tmp_path: Path) -> None:
    model = save(tmp_path, "llama", AutoModelForSequenceClassification, num_labels=num_labels)
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    expected = logits.sigmoid() if num_labels == 1 else logits.softmax(1)
    with LLM(tmp_path, **SETTINGS | WAYS[way]) as llm:
        probs = [output.outputs.probs for output in llm.classify(ids(PROMPTS), use_tqdm=False)]
        torch.testing.assert_close(torch.tensor(probs), expected, rtol=1e-4, atol=1e-5)
        raw = llm.encode(ids(PROMPTS), PoolingParams(use_activation=False), use_tqdm=False)
        torch.testing.assert_close(torch.stack([o.outputs.data for o in raw]), logits, rtol=1e-4, atol=1e-4)
        rewards = llm.reward(ids(PROMPTS), use_tqdm=False)
        assert [list(output.outputs.data.shape) for output in rewards] == [[len(p), num_labels] for p in PROMPTS]
        for output, last in zip(rewards, expected, strict=True):
            torch.testing.assert_close(output.outputs.data[-1], last, rtol=1e-4, atol=1e-5)
        tagged = llm.reward(ids(PROMPTS), pooling_params=PoolingParams(step_tag_id=PROMPTS[2][4]), use_tqdm=False)
        places = [i for i, token in enumerate(PROMPTS[2]) if token == PROMPTS[2][4]]
        torch.testing.assert_close(tagged[2].outputs.data, rewards[2].outputs.data[places])


def test_each_token_and_dimensions(tmp_path: Path) -> None:
    model = save(tmp_path, "qwen3", AutoModel, is_matryoshka=True)
    with LLM(tmp_path, **SETTINGS, runner="pooling") as llm:
        outputs = llm.encode(ids(PROMPTS), pooling_task="token_embed", use_tqdm=False)
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            expected = torch.nn.functional.normalize(states(model, prompt), dim=1)
            torch.testing.assert_close(output.outputs.data, expected, rtol=1e-4, atol=1e-5)
        short = llm.embed(ids(PROMPTS), pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        vector = states(model, PROMPTS[3])[-1][:8]
        torch.testing.assert_close(
            torch.tensor(short[3].outputs.embedding), vector / vector.norm(), rtol=1e-4, atol=1e-5
        )
        long = [5] * 128  # all of max_model_len: nothing is generated
        assert len(llm.embed(ids([long]), use_tqdm=False)[0].outputs.embedding) == 48
        with pytest.raises(
            ValueError, match=r"the prompt has 129 tokens; with max_model_len=128 it can have at most 128$"
        ):
            llm.embed(ids([[*long, 5]]), use_tqdm=False)


def test_bidirectional_attention(tmp_path: Path) -> None:
    model = save(tmp_path, "llama", AutoModel)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with LLM(tmp_path, **SETTINGS, runner="pooling") as llm:
        outputs = llm.embed(ids(PROMPTS), use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        size = len(prompt)
        with torch.no_grad():
            hidden = model(torch.tensor([prompt]), attention_mask=torch.zeros(1, 1, size, size)).last_hidden_state[0]
        vector = hidden.mean(0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), vector / vector.norm(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_function", [False, True])
def test_overrides_make_a_cross_encoder_of_two_tokens(text_checkpoint: tuple[Path, Any], is_function: bool) -> None:
    """As of Qwen3-Reranker: the probability of the second token against the first one."""
    folder, model = text_checkpoint
    words = Tokenizer.from_path(folder).convert_ids_to_tokens([20, 30])
    fields = {"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": words}

    def overrides(config: Any) -> Any:
        config.update(fields)
        return config

    settings = {**SETTINGS, "skip_tokenizer_init": False, "hf_overrides": overrides if is_function else fields}
    with LLM(folder, **settings) as llm:
        outputs = llm.classify(ids(PROMPTS), use_tqdm=False)
        (pair,) = llm.score("one text", "another", use_tqdm=False)
        prompts = [*PROMPTS, llm.get_tokenizer().encode("one text", "another")]
    scores = [*(output.outputs.probs[0] for output in outputs), pair.outputs.score]
    for score, prompt in zip(scores, prompts, strict=True):
        with torch.no_grad():
            no, yes = model(torch.tensor([prompt])).logits[0, -1, [20, 30]]
        assert score == pytest.approx(float((yes - no).sigmoid()), abs=1e-5)


def test_the_asynchronous_engine(tmp_path: Path) -> None:
    model = save(tmp_path, "llama", AutoModel)

    async def run() -> torch.Tensor:
        async with AsyncLLM(str(tmp_path), **SETTINGS, runner="pooling") as engine:
            with pytest.raises(TypeError, match=r"pooling_params is SamplingParams\(.*so it must be a PoolingParams"):
                await anext(engine.generate(ids(PROMPTS)[2], SamplingParams(), "generated"))
            params = PoolingParams(use_activation=False)
            (output,) = [output async for output in engine.encode(ids(PROMPTS)[2], params, "pooled", lora_request=None)]
            return output.outputs.data

    torch.testing.assert_close(asyncio.run(run()), states(model, PROMPTS[2])[-1], rtol=1e-4, atol=1e-5)


def test_what_is_refused(tmp_path: Path, text_model: Path) -> None:
    save(tmp_path, "llama", AutoModel)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    with LLM(tmp_path, **SETTINGS, runner="pooling") as llm:
        with pytest.raises(ValueError, match=r"LLM.generate needs a model that generates"):
            llm.generate(ids(PROMPTS), SamplingParams(), use_tqdm=False)
        with pytest.raises(
            ValueError, match=r"LLM.classify needs the task 'classify'; this model has embed, token_embed"
        ):
            llm.classify(ids(PROMPTS), use_tqdm=False)
        with pytest.raises(TypeError, match=r"LLM.embed got an unknown keyword 'lora_request'; LoRA adapters"):
            llm.embed(ids(PROMPTS), use_tqdm=False, lora_request=1)
        with pytest.raises(ValueError, match="dimensions is 8, but the model's config has no matryoshka"):
            llm.embed(ids(PROMPTS), pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    with pytest.raises(ValueError, match="BertModel"):
        LLM(tmp_path / "bert", **SETTINGS, runner="pooling")
    with LLM(text_model, **SETTINGS) as llm, pytest.raises(ValueError, match=r"LLM.embed needs a model for pooling"):
        llm.embed(ids(PROMPTS), use_tqdm=False)
    for setting in (
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"logits_processors": ["module:Class"]},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(setting))} is .* but the engine pools"):
            LLM(tmp_path, **SETTINGS, runner="pooling", **setting)
