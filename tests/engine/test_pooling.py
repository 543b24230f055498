"""Embeddings and scores, held against transformers and sentence-transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tests.helpers.commands import CommandRunner
from tests.helpers.pooling import (
    PAIR,
    PROMPTS,
    SETTINGS,
    SHAPE,
    TEMPLATE,
    TEXTS,
    ids,
    save,
    save_reward_model,
    save_with_tokenizer,
    states,
    with_modules,
)
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from fleetfoot import LLM, PoolingParams, SamplingParams
from fleetfoot.cli.plan import plan_report
from fleetfoot.cli.plan_text import plan_text
from fleetfoot.config.pooling import PoolerConfig
from fleetfoot.tokenizer.tokenizer import Tokenizer

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks and preemption": {"max_num_batched_tokens": 16, "max_num_seqs": 3, "num_gpu_blocks_override": 14},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16, "max_num_seqs": 4},
}


POOL: dict[str, Any] = {
    "lasttoken": lambda hidden: hidden[-1], "mean_tokens": lambda hidden: hidden.mean(0),
    "cls_token": lambda hidden: hidden[0],
}  # fmt: skip


RANKS = [("lasttoken", "tensor parallel"), ("mean_tokens", "pipeline")]


@pytest.mark.parametrize(
    ("mode", "way"), [*((mode, way) for mode in POOL for way in ("plain", "chunks and preemption")), *RANKS]
)
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
        times = outputs[3].metrics
        assert times.queued_ts <= times.scheduled_ts <= times.last_token_ts and not times.num_generation_tokens
        llm.llm_engine.check_integrity()


@pytest.mark.parametrize(("num_labels", "way"), [(1, "plain"), (3, "plain"), (1, "tensor parallel"), (3, "pipeline")])
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


FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {}, "smollm3": {"eos_token_id": 1}, "gemma2": {"sliding_window": 8}, "gemma3_text": {"sliding_window": 8},
    "olmo2": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_head_for_scores_of_every_family(kind: str, tmp_path: Path) -> None:
    more = {"num_labels": 3, "bos_token_id": 1, "eos_token_id": 1, **FAMILIES[kind]}
    model = save(tmp_path, kind, AutoModelForSequenceClassification, **more)
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([prompt])).logits.softmax(1) for prompt in PROMPTS])
    with LLM(tmp_path, **SETTINGS) as llm:
        probs = [output.outputs.probs for output in llm.classify(ids(PROMPTS), use_tqdm=False)]
    torch.testing.assert_close(torch.tensor(probs), expected, rtol=1e-4, atol=1e-5)


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
            ValueError,
            match=r"prompt has 129 tokens; this model's .* 128 tokens \(max_model_len\), so it can have at most 128$",
        ):
            llm.embed(ids([[*long, 5]]), use_tqdm=False)


BIDIRECTIONAL: dict[str, dict[str, Any]] = {
    "llama": {"is_causal": False}, "mistral": {"is_causal": False, "sliding_window": 5},
    "gemma3_text": {"use_bidirectional_attention": True, "sliding_window": 8, "bos_token_id": 1, "eos_token_id": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", BIDIRECTIONAL)
def test_bidirectional_attention(kind: str, tmp_path: Path) -> None:
    """With windows, and half of one on either side."""
    model = save(tmp_path, kind, AutoModel, **BIDIRECTIONAL[kind])
    with pytest.raises(ValueError, match=r"tokens attend to later ones .*so the model generates no text"):
        LLM(tmp_path, **SETTINGS, runner="generate")
    with LLM(tmp_path, **SETTINGS, max_num_seqs=2) as llm:
        outputs = llm.embed(ids(PROMPTS), use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        vector = states(model, prompt).mean(0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), vector / vector.norm(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_function", [False, True])
def test_overrides_make_a_cross_encoder_of_two_tokens(text_checkpoint: tuple[Path, Any], is_function: bool) -> None:
    """As of Qwen3-Reranker: the probability of the second token against the first one."""
    folder, model = text_checkpoint
    words = Tokenizer.from_path(folder).convert_ids_to_tokens([20, 30])
    fields: dict[str, Any] = {"architectures": ["LlamaForSequenceClassification"], "classifier_from_token": words}
    fields |= {"is_original_qwen3_reranker": True}

    def overrides(config: Any) -> Any:
        config.update(fields)
        return config

    settings = {**SETTINGS, "skip_tokenizer_init": False, "hf_overrides": overrides if is_function else fields}
    with LLM(folder, **settings) as llm:
        outputs = llm.classify(ids(PROMPTS), use_tqdm=False)
        pairs = llm.score("one text", ["another", "a third"], use_tqdm=False)
        pairs += llm.score({"prompt": "one text"}, "another", chat_template=PAIR, use_tqdm=False)
        joined = ("one textanother", "one texta third", "<|user|>one text or another?")
        prompts = [*PROMPTS, *map(llm.get_tokenizer().encode, joined)]
        assert "logit of token 30 minus that of 20; activation: sigmoid" in plan_text(
            "m", plan_report(llm.llm_engine.plan)
        )
    scores = [*(output.outputs.probs[0] for output in outputs), *(pair.outputs.score for pair in pairs)]
    for score, prompt in zip(scores, prompts, strict=True):
        with torch.no_grad():
            no, yes = model(torch.tensor([prompt])).logits[0, -1, [20, 30]]
        assert score == pytest.approx(float((yes - no).sigmoid()), abs=1e-5)


MODULES: dict[str, tuple[list[Any], str | None, dict[str, Any]]] = {
    "last token": ([Pooling(48, "lasttoken"), Normalize()], None, {}),
    "mean, projected, cut": ([Pooling(48, "mean"), Dense(48, 24), Normalize()], None, {"truncate_dim": 16}),
    "two projections, not normalised": (
        [Pooling(48, "mean"), Dense(48, 24), Dense(24, 8, bias=False, activation_function=torch.nn.ReLU())], None, {}
    ),
    "prompts": ([Pooling(48, "mean"), Normalize()], None, {"default_prompt_name": "query"}),
    "chat template": ([Pooling(48, "lasttoken"), Normalize()], TEMPLATE, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", MODULES)
def test_checkpoints_of_sentence_transformers(case: str, tmp_path: Path) -> None:
    modules, template, more = MODULES[case]
    save_with_tokenizer(tmp_path / "base", "qwen3", AutoModel, template)
    prompts = {"query": "ask: ", "document": ""}
    made = SentenceTransformer(modules=[Transformer(str(tmp_path / "base")), *modules], prompts=prompts, **more)
    made.save(str(tmp_path / "made"))
    reference = SentenceTransformer(str(tmp_path / "made"), device="cpu", **more)
    with LLM(tmp_path / "made", **SETTINGS | {"skip_tokenizer_init": False}) as llm:
        for name in (None, *prompts):
            outputs = llm.embed(TEXTS, pooling_params=PoolingParams(prompt_name=name), use_tqdm=False)
            vectors = torch.tensor([output.outputs.embedding for output in outputs])
            expected = reference.encode(TEXTS, prompt_name=name, convert_to_tensor=True)
            torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)
        if "projected" in case:
            with pytest.raises(ValueError, match="dense layers of sentence-transformers, which are read at the start"):
                llm.reload_weights(tmp_path / "made")
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
        expected = reference.encode(TEXTS, convert_to_tensor=True)
        assert scores == pytest.approx(reference.similarity(expected[:1], expected)[0].tolist(), abs=1e-5)
        reference.max_seq_length = 4
        if template is None:  # else it keeps the template's end
            outputs = llm.embed(TEXTS, truncate_prompt_tokens=4, use_tqdm=False)
            vectors = torch.tensor([output.outputs.embedding for output in outputs])
            expected = reference.encode(TEXTS, convert_to_tensor=True)
            torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case", ["llama", "qwen2", "mistral with a template", "qwen3 with logits", "qwen3 with one logit"]
)
def test_cross_encoders_of_sentence_transformers(case: str, tmp_path: Path) -> None:
    kind, has_logits = case.split()[0], "logit" in case
    cls = AutoModelForCausalLM if has_logits else AutoModelForSequenceClassification
    labels = {} if has_logits else {"num_labels": 1}
    save_with_tokenizer(tmp_path / "base", kind, cls, TEMPLATE if "template" in case else None, **labels)
    base = str(tmp_path / "base")
    if has_logits:
        tokens = (30, 20) if "logits" in case else (30,)
        modules = [Transformer(base, transformer_task="text-generation"), LogitScore(*tokens)]
        CrossEncoder(modules=modules, device="cpu").save_pretrained(str(tmp_path / "made"))
    else:
        CrossEncoder(base, device="cpu").save_pretrained(str(tmp_path / "made"))
    reference = CrossEncoder(str(tmp_path / "made"), device="cpu")
    with LLM(tmp_path / "made", **SETTINGS | {"skip_tokenizer_init": False}) as llm:
        for params, options in ((None, {}), (PoolingParams(softmax=False), {"activation_fn": torch.nn.Identity()})):
            outputs = llm.score(TEXTS[0], TEXTS, pooling_params=params, use_tqdm=False)
            expected = reference.predict([(TEXTS[0], text) for text in TEXTS], **options)
            assert [output.outputs.score for output in outputs] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(("name", "num_labels"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
def test_reward_models(name: str, num_labels: int, tmp_path: Path) -> None:
    model, head = save_reward_model(tmp_path, name, num_labels)
    prompt, tag = PROMPTS[3], PROMPTS[3][7]
    hidden = (states(model, prompt) @ head["score.0.weight"].T + head["score.0.bias"]).relu()
    scores = hidden @ head["score.2.weight"].T + head["score.2.bias"]
    expected = scores if num_labels == 1 else scores.softmax(1)
    with LLM(tmp_path, **SETTINGS, max_num_batched_tokens=16, max_num_seqs=2) as llm:
        (output,) = llm.reward(ids([prompt]), use_tqdm=False)
        torch.testing.assert_close(output.outputs.data, expected, rtol=1e-3, atol=1e-4)
        (output,) = llm.encode(ids([prompt]), PoolingParams(step_tag_id=tag), use_tqdm=False)
        places = [index for index, token in enumerate(prompt) if token == tag]
        torch.testing.assert_close(output.outputs.data, expected[places], rtol=1e-3, atol=1e-4)
        (output,) = llm.classify(ids([prompt]), use_tqdm=False)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected[-1], rtol=1e-3, atol=1e-4)


CONFIG_CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"pooling_type": "ALL"}, {"prefers_tokens": True, "pooling_type": "LAST", "token_pooling_type": "ALL"}),
    ({}, {"pooling_type": "STEP", "step_tag_id": 5}, {"prefers_tokens": True, "token_pooling_type": "STEP"}),
    ({}, {"task": "token_embed", "normalize": False}, {"prefers_tokens": True, "use_activation": False}),
    ({"is_matryoshka": True}, {"dimensions": 8}, {"dimensions": 8, "matryoshka": ()}),
    ({}, {"returned_token_ids": [5, 6, 7]}, {"head": "logits", "size": 3, "activation": "softmax"}),
    ({"num_labels": 3, "problem_type": "multi_label_classification"}, {}, {"activation": "sigmoid", "size": 3}),
    ({"num_labels": 1, "problem_type": "regression"}, {"logit_mean": 2.0},
     {"activation": "identity", "logit_mean": 2.0}),
    ({"num_labels": 3, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {},
     {"activation": "identity"}),
    ({"architectures": ["LlamaBidirectionalModel"], "pooling": "avg"}, {},
     {"is_causal": False, "pooling_type": "MEAN"}),
    ({"architectures": ["LlamaBidirectionalForSequenceClassification"], "num_labels": 1, "temperature": 0.5}, {},
     {"is_causal": False, "logit_sigma": 0.5, "head": "score"}),
]  # fmt: skip


def test_what_configs_pool(tmp_path: Path, run: CommandRunner) -> None:
    """From ``config.json``, without a runner, and with the setting."""
    config = {"model_type": "llama", "architectures": ["LlamaModel"], **SHAPE}
    for fields, override, expected in CONFIG_CASES:
        head = {"architectures": ["LlamaForSequenceClassification"]} if "num_labels" in fields else {}
        (tmp_path / "config.json").write_text(json.dumps(config | head | fields))
        found = run.json("plan", str(tmp_path), "--json", "--device", "cpu", "--pooler-config", json.dumps(override))
        assert found["pooling"] == found["pooling"] | {key: list(v) if v == () else v for key, v in expected.items()}
        assert found["model_runner"] == "v1" and found["pooling"]["tasks"]


REFUSED_FILES: list[tuple[str, Any, str]] = [
    (
        "modules.json",
        [{"type": "x.WordEmbeddings", "path": ""}],
        "the modules are WordEmbeddings; supported, in this order",
    ),
    ("modules.json", [3], "must hold a list of objects"),
    ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling_mode is max; supported: lasttoken, mean, cls"),
    ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt is False"),
    ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name is 'query'"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is True; texts are tokenized as they are"),
]


def test_what_is_refused(tmp_path: Path, text_model: Path) -> None:
    save(tmp_path, "llama", AutoModel)
    for index, (name, content, message) in enumerate(REFUSED_FILES):
        (folder := tmp_path / str(index)).mkdir()
        with_modules(folder, "mean_tokens", normalize=True)
        (folder / "config.json").write_text((tmp_path / "config.json").read_text())
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=re.escape(message)):
            LLM(folder, **SETTINGS)
    with LLM(tmp_path, **SETTINGS) as llm:
        for call in (llm.generate, llm.beam_search, llm.chat):
            with pytest.raises(ValueError, match=f"LLM.{call.__name__} needs a model that generates"):
                call(ids(PROMPTS), SamplingParams())
        with pytest.raises(
            ValueError, match=r"LLM.classify needs the task 'classify'; this model has embed, token_embed"
        ):
            llm.classify(ids(PROMPTS), use_tqdm=False)
        with pytest.raises(TypeError, match=r"LLM.embed got an unknown keyword 'lora_request'; LoRA adapters"):
            llm.embed(ids(PROMPTS), use_tqdm=False, lora_request=1)
        for params, message in (
            ({"dimensions": 8}, "dimensions is 8, but the model's config has no matryoshka"),
            ({"step_tag_id": 8}, "step_tag_id is 8, and task 'embed' is not of tokens"),
            ({"task": "token_embed"}, "task is 'token_embed' in pooling_params, and the call is for 'embed'"),
            (
                {"truncate_prompt_tokens": 200},
                "truncate_prompt_tokens is 200; with max_model_len=128 it can be at most",
            ),
            ({"prompt_name": "query"}, "prompt_name is 'query', and the prompt has no text"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.embed(ids(PROMPTS), use_tqdm=False, pooling_params=PoolingParams(**params))
        for first, second, message in (
            (["a", "b"], ["c"], "data_2 has 1 texts, and data_1 2; data_1 must have one, or as many"),
            ("a", ["b", 3], r"data_2\[1\] is 3; it must be a text"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                llm.score(first, second, use_tqdm=False)
    for setting, message in (
        ({"hf_overrides": {"architectures": ["BertModel"]}}, r"BertModel is an encoder.*Qwen/Qwen3-Embedding-0.6B"),
        ({"hf_overrides": {"is_encoder_decoder": True, "architectures": ["T5"]}}, "T5 is an encoder-decoder"),
        ({"use_v2_model_runner": True}, "it does not support what is on:\n  - pooling tasks"),
        ({"runner": "generate", "pooler_config": {}}, "pooler_config is set, and runner is 'generate'"),
        ({"pooler_config": {"dimensions": 4}}, "pooler_config: dimensions is 4, but the model's config has no"),
        ({"pooler_config": {"task": "classify"}}, "task is 'classify'; with this model it can be embed, token_embed"),
        ({"pooler_config": {"normalize": True, "softmax": False}}, "normalize and softmax differ"),
        ({"pooler_config": {"enable_chunked_processing": True}}, "truncate_prompt_tokens cuts longer ones"),
        ({"hf_overrides": {"classifier_from_token": ["no"], "method": "x"}}, "method is 'x'; supported: from_2_way"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            LLM(tmp_path, **SETTINGS, **setting)
    with pytest.raises(TypeError, match=r"PoolerConfig got an unknown keyword 'max_embed_len'; a text has at most"):
        PoolerConfig(max_embed_len=5)  # type: ignore[call-arg]
    with LLM(text_model, **SETTINGS) as llm, pytest.raises(ValueError, match=r"LLM.embed needs a model for pooling"):
        llm.embed(ids(PROMPTS), use_tqdm=False)
    for setting in (
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"logits_processors": ["module:Class"]},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(setting))} is .* but the engine pools"):
            LLM(tmp_path, **SETTINGS, **setting)
