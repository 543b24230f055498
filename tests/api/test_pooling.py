"""Endpoints of models that pool, against the calls of `LLM` on the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import CreateEmbeddingResponse
from transformers import AutoModel, AutoModelForSequenceClassification

from fleetfoot import LLM, PoolingParams
from tests.helpers.openapi import Document
from tests.helpers.pooling import PAIR, SETTINGS, TEMPLATE, TEXTS, save_with_tokenizer
from tests.helpers.server import RunningServer

FLAGS = ("--device", "cpu", "--dtype", "float32", "--trust-request-chat-template", "--num-gpu-blocks-override", "128")
IDS = [[5, 6, 7], [9]]


class Pair:
    """A server of a checkpoint, and an engine of the same."""

    def __init__(self, server: RunningServer, llm: LLM) -> None:
        self.llm = llm
        self.url = server.url
        self.http = httpx.Client(base_url=server.url, timeout=60)
        self.document = Document(server.url)

    def post(self, path: str, **body: Any) -> Any:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return self.document.check(response)

    def refused(self, path: str, **body: Any) -> str:
        """The field that a refusal names."""
        response = self.http.post(path, json=body)
        assert response.status_code == 400, response.text
        error = self.document.check(response)["error"]
        assert error["param"].partition("[")[0] in error["message"]
        return error["param"]

    def scores(self, first: Any, second: Any, **options: Any) -> Any:
        outputs = self.llm.score(first, second, use_tqdm=False, **options)
        return pytest.approx([output.outputs.score for output in outputs], abs=1e-5)


def serve(folder: Path) -> Iterator[Pair]:
    with (
        RunningServer(str(folder), *FLAGS) as server,
        LLM(folder, **SETTINGS | {"skip_tokenizer_init": False}) as llm,
    ):
        pair = Pair(server, llm)
        with pair.http:
            yield pair


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("embeds")
    save_with_tokenizer(folder, "llama", AutoModel, TEMPLATE, is_matryoshka=True)
    yield from serve(folder)


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A cross-encoder."""
    folder = tmp_path_factory.mktemp("scores")
    save_with_tokenizer(folder, "llama", AutoModelForSequenceClassification, num_labels=1, id2label={0: "GOOD"})
    yield from serve(folder)


def test_embeddings(embeds: Pair) -> None:
    expected = embeds.llm.embed(TEXTS, use_tqdm=False)
    vectors = [pytest.approx(output.outputs.embedding, abs=1e-5) for output in expected]
    answer = embeds.post("/v1/embeddings", input=TEXTS)
    CreateEmbeddingResponse.model_validate(answer, strict=True)
    assert [entry["embedding"] for entry in answer["data"]] == vectors
    assert answer["usage"]["total_tokens"] == sum(len(output.prompt_token_ids) for output in expected)
    with openai.OpenAI(base_url=f"{embeds.url}/v1", api_key="none", max_retries=0) as api:  # it sends base64
        data = api.embeddings.create(model=str(answer["model"]), input=TEXTS).data
        assert [entry.embedding for entry in data] == vectors
    by_ids = embeds.llm.embed([{"prompt_token_ids": ids} for ids in IDS], use_tqdm=False)
    cut = embeds.post("/v1/embeddings", input=IDS, dimensions=8, normalize=True)["data"]
    assert [len(entry["embedding"]) for entry in cut] == [8, 8]
    assert [entry["embedding"] for entry in embeds.post("/v1/embeddings", input=IDS)["data"]] == [
        pytest.approx(output.outputs.embedding, abs=1e-5) for output in by_ids
    ]
    text = "<|user|>user: Hello"
    by_chat = embeds.post("/v1/embeddings", messages=[{"role": "user", "content": "Hello"}])["data"][0]["embedding"]
    ids = embeds.llm.get_tokenizer().encode(text, add_special_tokens=False)
    (one,) = embeds.llm.embed([{"prompt_token_ids": ids}], use_tqdm=False)
    assert by_chat == pytest.approx(one.outputs.embedding, abs=1e-5)


def test_classification(scores: Pair) -> None:
    expected = scores.llm.classify(TEXTS, use_tqdm=False)
    answer = scores.post("/classify", input=TEXTS)
    assert answer["object"] == "list"
    for entry, output in zip(answer["data"], expected, strict=True):
        assert entry["probs"] == pytest.approx(output.outputs.probs, abs=1e-5)
        assert (entry["label"], entry["num_classes"]) == ("GOOD", 1)
    raw = scores.llm.classify("one", pooling_params=PoolingParams(activation=False), use_tqdm=False)
    (entry,) = scores.post("/classify", input="one", activation=False)["data"]
    assert entry["probs"] == pytest.approx(raw[0].outputs.probs, abs=1e-5)


@pytest.mark.parametrize("kind", ["embeds", "scores"])
def test_scores(kind: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(kind)
    for path, names in (
        ("/score", ("text_1", "text_2")), ("/v1/score", ("queries", "documents")), ("/score", ("data_1", "data_2")),
    ):  # fmt: skip
        for first, second in (("one", TEXTS), (TEXTS, TEXTS[::-1]), ("one", "two")):
            answer = pair.post(path, **dict(zip(names, (first, second), strict=True)))
            assert [entry["score"] for entry in answer["data"]] == pair.scores(first, second)
            assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    assert pair.refused("/score", text_1=["a", "b"], text_2=["c"]) == "text_1"
    assert pair.refused("/score", text_1="a") == "text_2"
    assert pair.refused("/score", text_1="a", text_2=["b", "long " * 200]) == "text_2[1]"
    if kind == "scores":
        by_template = pair.post("/score", text_1="one", text_2=TEXTS, chat_template=PAIR)["data"]
        assert [entry["score"] for entry in by_template] == pair.scores("one", TEXTS, chat_template=PAIR)
    else:
        pair.refused("/score", text_1="a", text_2="b", chat_template=PAIR)


@pytest.mark.parametrize("kind", ["embeds", "scores"])
def test_reranking(kind: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(kind)
    expected = pair.scores("one", TEXTS).expected
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    for path, documents in (("/rerank", TEXTS), ("/v1/rerank", [{"text": text} for text in TEXTS])):
        results = pair.post(path, query="one", documents=documents)["results"]
        assert [result["index"] for result in results] == order
        assert [result["document"]["text"] for result in results] == [TEXTS[index] for index in order]
        assert [result["relevance_score"] for result in results] == pytest.approx([expected[index] for index in order])
    answer = pair.post("/v2/rerank", query="one", documents=TEXTS, top_n=1, return_documents=False)
    assert [set(result) for result in answer["results"]] == [{"index", "relevance_score"}]
    cut = pair.post("/rerank", query="one", documents=TEXTS, max_tokens_per_doc=2)["results"]
    tokenizer = pair.llm.get_tokenizer()
    texts = [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:2]) for text in TEXTS]
    by_index = sorted(cut, key=lambda result: result["index"])
    assert [result["relevance_score"] for result in by_index] == pair.scores("one", texts)
    assert pair.refused("/rerank", query="a", documents=[]) == "documents"
    assert pair.refused("/rerank", query="a", documents=["b"], top_n=-1) == "top_n"


def test_refusals(embeds: Pair, scores: Pair, client: httpx.Client) -> None:
    for pair, path, body, field in (
        (embeds, "/v1/embeddings", {}, "input"),
        (embeds, "/v1/embeddings", {"input": "a", "messages": []}, "input"),
        (embeds, "/v1/embeddings", {"input": []}, "input"),
        (embeds, "/v1/embeddings", {"input": "a", "dimensions": 4000}, "dimensions"),
        (embeds, "/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (embeds, "/v1/embeddings", {"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        (embeds, "/v1/embeddings", {"input": ["a", "long " * 200]}, "input[1]"),
        (embeds, "/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        (embeds, "/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        (embeds, "/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
        (embeds, "/pooling", {"input": "a", "task": "classify"}, "task"),
        (scores, "/classify", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (scores, "/pooling", {"input": "a", "dimensions": 4}, "dimensions"),
    ):
        assert pair.refused(path, **body) == field
    for http, path, body in (
        (embeds.http, "/classify", {"input": "a"}),
        (scores.http, "/v1/embeddings", {"input": "a"}),
        (embeds.http, "/v1/completions", {"prompt": "a"}),
        (client, "/rerank", {"query": "a", "documents": ["b"]}),  # a model that generates
    ):
        assert http.post(path, json=body).status_code == 400
