"""The page at ``/``: its files and headers, who may look at the engine, and the page itself in headless Chromium.

Tests of the page itself are skipped where there is no Chromium.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.browser import CHROMIUM, Page, browser
from tests.helpers.server import RunningServer

ASSETS = {file.name: file.read_text("utf-8") for file in (files("fleetfoot.server.page") / "assets").iterdir()}
FLAGS = "--api-key", "chat-key", "--enable-admin-routes", "--admin-key", "admin-key", "--num-gpu-blocks-override", "200"


@pytest.fixture(scope="module")
def watched() -> Iterator[RunningServer]:
    """A server with a key for chats and one for administrators."""
    with RunningServer(*FLAGS, "--dtype", "float32", "--device", "cpu", "--max-num-seqs", "4") as running:
        yield running


@pytest.fixture(scope="module")
def http(watched: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=watched.url, timeout=60) as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- files and access -------------------------------------------------------------------------------------------------


def test_files_need_no_key_and_forbid_what_is_from_elsewhere(http: httpx.Client) -> None:
    for path in ("/", *(f"/page/{name}" for name in ASSETS if name != "index.html")):
        answer = http.get(path)
        assert answer.status_code == 200, path
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" == policy["connect-src"]
        assert policy["frame-ancestors"] == "'none'" and answer.headers["x-content-type-options"] == "nosniff"
        assert http.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    assert http.get("/page/routes.py").status_code in (401, 404)
    assert http.get("/page/../routes.py").status_code in (401, 404)


def test_no_file_makes_markup_of_text_or_loads_from_elsewhere() -> None:
    for name, text in ASSETS.items():
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
            )
        if name == "index.html":
            assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|<style", text)
            assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", text)
        assert "@import" not in text and "url(http" not in text


@pytest.mark.parametrize("key", ["", "chat-key", "wrong"])
def test_the_engine_is_shown_for_the_admin_key_alone(http: httpx.Client, key: str) -> None:
    for path in ("/live/events", "/live/trace"):
        answer = http.get(path, headers=bearer(key) if key else {})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_without_an_admin_key_there_is_no_view(server: RunningServer, client: httpx.Client) -> None:
    assert client.get("/live/events").status_code == 404
    assert client.get("/").status_code == 200


def looks(http: httpx.Client, count: int) -> Iterator[dict[str, Any]]:
    with http.stream("GET", "/live/events", headers=bearer("admin-key")) as answer:
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        for _, event in zip(range(count), events, strict=False):
            yield event["engines"][0]


def test_events_tell_what_the_engine_does_without_ids_or_texts(http: httpx.Client) -> None:
    """Two requests with the same prefix are two lanes: chunks of the prompt, hits in the cache, their ends."""
    prompt, name = [5 + number % 90 for number in range(64)], "a-secret-request"
    seen: list[dict[str, Any]] = []
    for number, look in enumerate(looks(http, 40)):
        seen.append(look)
        if number in (1, 3):
            body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
            http.post("/v1/completions", json=body, headers={**bearer("chat-key"), "X-Request-Id": name})
        if look["finished"].get("length", 0) >= 2 and number > 5:
            break
    first, last = seen[0], seen[-1]
    assert first["plan"]["runner"] in ("v1", "v2") and first["plan"]["reasons"] and "plan" not in seen[1]
    steps = [step for look in seen for step in look["steps"]]
    assert [step[0] for step in steps] == sorted(step[0] for step in steps)
    chunks = {lane: sum(size for step in steps for one, size in step[8] if one == lane) for lane in (0, 1)}
    begun = [entry for step in steps for entry in step[7]]
    assert [entry[:2] for entry in begun] == [[0, 64], [1, 64]]
    assert [chunks[lane] + begun[lane][2] for lane in (0, 1)] == [64, 64]
    assert begun[0][2] == 0 < begun[1][2] == last["prefix"][1]  # the second has a prefix of the first
    assert sum(step[3] for step in steps) == 2 * 5  # decodes: the first token is the prompt's
    ((kind, used, cached, total),) = last["kv"][0]
    assert (kind, used, total) == ("all tokens", 0, 200) and cached > 0
    assert last["latencies"]["ttft"][-1] == ["+Inf", 2] and last["latencies"]["itl"][-1] == ["+Inf", 10]
    assert name not in json.dumps(seen)


def test_a_trace_for_perfetto_is_saved_on_request(http: httpx.Client) -> None:
    for query in ("seconds=0", "seconds=61", "seconds=nan", "seconds=x", "time=3"):
        refused = http.get(f"/live/trace?{query}", headers=bearer("admin-key"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, query.split("=")[0])
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(http.get, "/live/trace?seconds=0.6", headers=bearer("admin-key"))
        while not answer.done():
            body = {"prompt": [9, 8, 7], "max_tokens": 6, "ignore_eos": True}
            http.post("/v1/completions", json=body, headers=bearer("chat-key"))
    names = {event["name"] for event in answer.result().json()["traceEvents"]}
    assert {"step", "prompt", "decode", "requests", "process_name"} <= names
    assert any(name.startswith("request ") for name in names)


def test_more_viewers_than_an_engine_has_time_for_are_sent_away(http: httpx.Client) -> None:
    streams = [looks(http, 10) for _ in range(8)]
    for stream in streams:
        next(stream)
    refused = http.get("/live/events", headers=bearer("admin-key"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_viewers")
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:99", 200),
        ("127.9.9.9", 200),
        ("[::1]:8000", 200),
        ("app.localhost", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("evil.example@localhost", 403),
        ("10.0.0.1", 403),
    ],
)
@pytest.mark.parametrize("path", ["/", "/v1/models", "/health"])
def test_other_names_of_a_loopback_address_are_refused(http: httpx.Client, path: str, host: str, status: int) -> None:
    answer = http.get(path, headers={"Host": host, **bearer("chat-key")})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "unknown_host"


# --- the page ---------------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

XSS = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "[a](javascript:window.hacked=1)",
    "[a](  JaVaScRiPt:window.hacked=1 )",
    "[a](data:text/html,<script>window.hacked=1</script>)",
    "![a](x onerror=window.hacked=1)",
    '[a](https://x.example/" onmouseover="window.hacked=1)',
    "<javascript:window.hacked=1>",
    "`<svg onload=window.hacked=1>`",
    "```html\n<script>window.hacked=1</script>\n```",
    '```"><script>window.hacked=1</script>\nx\n```',
    "| <b onclick=window.hacked=1>a</b> | b |\n|---|---|\n| <iframe src=javascript:window.hacked=1> | c |",
    "> <svg><animate onbegin=window.hacked=1 attributeName=x>",
    "- <details open ontoggle=window.hacked=1>",
    "# <style>*{display:none}</style>",
    "&lt;script&gt;window.hacked=1&lt;/script&gt;",
    "[[a](javascript:window.hacked=1)](javascript:window.hacked=1)",
    '**<math><mtext></mtext><mglyph><svg><mtext><style><path id="</style><img onerror=window.hacked=1 src>">**',
]

CODE = (
    '<div class="code"><span class="faint">{}</span><button type="button" class="quiet copy">Copy</button>'
    '<pre tabindex="0"><code>{}</code></pre></div>'
)
MARKDOWN = {
    "# A *b*": "<h3>A <em>b</em></h3>",
    "a **b** `c*d*` ~~e~~": "<p>a <strong>b</strong> <code>c*d*</code> <del>e</del></p>",
    "snake_case_name and 2*3*4": "<p>snake_case_name and 2<em>3</em>4</p>",
    "1. a\n2. b\n   - c\n   - d": (
        '<ol dir="auto" start="1"><li>a</li><li><p>b</p><ul dir="auto"><li>c</li><li>d</li></ul></li></ol>'
    ),
    "a | b | c\n--- | -: | :-:\n1 | 2 | `3\\|4`": (
        '<div class="scroll" tabindex="0"><table>'
        '<thead><tr><th>a</th><th class="right">b</th><th class="center">c</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="right">2</td><td class="center"><code>3|4</code></td></tr></tbody>'
        "</table></div>"
    ),
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "a  \nb": "<p>a<br>b</p>",
    "\\*a\\*": "<p>*a*</p>",
    "x\n\n---": "<p>x</p><hr>",
    "1. a\n   ```py\n   if b:\n\n     c\n   ```\n2. d\n\ne": (
        f'<ol dir="auto" start="1"><li><p>a</p>{CODE.format("py", "if b:" + chr(10) * 2 + "  c")}</li>'
        "<li>d</li></ol><p>e</p>"
    ),
    "- a\n\n- b\n\n1. c": '<ul dir="auto"><li>a</li><li>b</li></ul><ol dir="auto" start="1"><li>c</li></ol>',
    "```a``` b": "<p><code>a</code> b</p>",
    "[a](https://b.example/c_(d)) e": (
        '<p><a href="https://b.example/c_(d)" rel="noopener noreferrer nofollow" target="_blank">a</a> e</p>'
    ),
    "": "",
}


@pytest.fixture(scope="module")
def tab(watched: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page after the key that it has asked for was given."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    with browser(tmp_path_factory.mktemp("browser")) as page:
        page.resize(1280, 800)
        page.open(watched.url)
        page.until("document.getElementById('status').textContent.includes('API key')")
        page.run(
            "(key => { key.value = 'chat-key'; key.dispatchEvent(new Event('change')) })"
            "(document.getElementById('api-key'))"
        )
        page.until("document.getElementById('models').options.length")
        yield page


def say(tab: Page, text: str) -> None:
    tab.run("document.getElementById('prompt').focus()")
    tab.type(text)
    tab.press("Enter")


def articles(tab: Page) -> list[str]:
    found: list[str] = tab.run("[...document.querySelectorAll('article .body')].map(one => one.innerText)")
    return found


def click(tab: Page, label: str, place: int = -1) -> None:
    tab.run(f"[...document.querySelectorAll('[aria-label={json.dumps(label)}]')].at({place}).click()")


DONE = "!document.querySelector('.caret') && document.getElementById('stop').disabled"


@needs_browser
def test_a_chat_is_answered_edited_branched_and_kept(tab: Page, watched: RunningServer) -> None:
    for name, value in {"max_tokens": 12, "temperature": 0.9, "seed": 3}.items():
        tab.run(f"document.getElementById('{name}').value = {value}")
    say(tab, "Tell me of the <b>sea</b>")
    tab.until(f"document.querySelectorAll('article').length == 2 && {DONE}")
    asked, first = articles(tab)
    assert asked == "Tell me of the <b>sea</b>" and "12 tokens" in first
    tab.run("document.getElementById('max_tokens').value = 7")
    click(tab, "Regenerate this answer")
    tab.until(f"document.querySelector('article.assistant .tools').innerText.includes('2 of 2') && {DONE}")
    second = articles(tab)[1]
    assert "7 tokens" in second
    click(tab, "Branch before")
    assert articles(tab)[1] == first
    click(tab, "Edit this message", 0)
    tab.run("document.querySelector('article textarea').value = 'And of hills'")
    click(tab, "Save as a branch")
    tab.until(f"{DONE} && document.querySelector('article.user .tools').innerText.includes('2 of 2')")
    assert articles(tab)[0] == "And of hills"
    click(tab, "Continue from here in a new chat", 0)
    assert articles(tab) == ["And of hills"]
    assert tab.run("document.querySelectorAll('#conversations li').length") == 2
    tab.open(watched.url)  # from this browser's storage
    assert tab.run("document.querySelectorAll('#conversations li').length") == 2
    click(tab, "Delete Tell me of the <b>sea</b> (copy)")
    assert articles(tab)[0] == "And of hills"
    assert tab.problems == [one for one in tab.problems if "401" in one]


@needs_browser
def test_an_answer_is_stopped_with_escape(tab: Page) -> None:
    tab.until("document.getElementById('models').options.length")
    tab.press("k", modifiers=2)
    tab.run("document.getElementById('max_tokens').value = 1900; document.getElementById('logprobs').checked = true")
    tab.run("""document.getElementById('schema').value = '{"type": "string", "minLength": 9000}'""")
    say(tab, "Go on for long")
    tab.until("document.querySelectorAll('.tokens span').length > 3")
    tab.press("Escape")
    tab.until(DONE)
    assert articles(tab)[1].endswith("Stopped.")
    shown = tab.run("document.querySelectorAll('.tokens span[class^=p][title]').length")
    assert 3 < shown < 1900
    tab.run("document.getElementById('logprobs').checked = false; document.getElementById('max_tokens').value = ''")
    tab.run("document.getElementById('schema').value = ''")


@needs_browser
def test_a_turn_that_failed_is_not_sent_again(tab: Page) -> None:
    tab.press("k", modifiers=2)
    tab.run(
        "window.sent = []; window.real = window.fetch; window.fetch = (url, options) => {"
        "window.sent.push(JSON.parse(options.body)); return Promise.resolve(new Response('{}', { status: 401 })) };"
    )
    for text in ("First", "Second"):
        say(tab, text)
        tab.until(f"{DONE} && window.sent.length == {1 + (text == 'Second')}")
    sent = tab.run("window.sent.map(body => body.messages)")
    tab.run("window.fetch = window.real")
    assert sent == [[{"role": "user", "content": text}] for text in ("First", "Second")]


@needs_browser
def test_settings_reach_the_server_and_tools_get_results(tab: Page) -> None:
    """The request that is sent, and a stream of reasoning and of tool calls, which the tests' model never makes."""
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "I *must* look"}}]},
        {
            "choices": [
                {"delta": {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look", "arguments": '{"a"'}}]}}
            ]
        },
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}}]},
        {"choices": [], "usage": {"completion_tokens": 9}},
    ]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    tab.press("k", modifiers=2)
    tab.run(
        "window.sent = []; window.real = window.fetch; "
        "window.fetch = (url, options) => { window.sent.push(JSON.parse(options.body));"
        f"return Promise.resolve(new Response({json.dumps(stream)})) }};"
    )
    values = {
        "system": "Be brief",
        "temperature": 0.5,
        "top_k": 7,
        "tools": '[{"type": "function"}]',
        "schema": '{"type": "object"}',
    }
    for name, value in values.items():
        tab.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(str(value))}")
    say(tab, "What is there?")
    tab.until(f"document.querySelector('.call') && {DONE}")
    assert tab.run("document.querySelector('.call pre').textContent") == '{\n  "a": 1\n}'
    assert tab.run("document.querySelector('details em').textContent") == "must"
    tab.run("document.querySelector('.call textarea').value = 'a hill'")
    click(tab, "Send the result of look")
    tab.until("window.sent.length == 2")
    first, second = tab.run("window.sent")
    assert first["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "What is there?"},
    ]
    assert (first["temperature"], first["top_k"], first["tools"]) == (0.5, 7, [{"type": "function"}])
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    assert second["messages"][2] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert second["messages"][3] == {"role": "tool", "content": "a hill", "tool_call_id": "c1"}
    tab.until(DONE)
    tab.run("document.getElementById('tools').value = '[{'; window.sent.length = 0")
    say(tab, "And now?")
    tab.until("document.getElementById('settings-problem').textContent.startsWith('Tools')")
    assert tab.run("window.sent.length") == 0
    assert tab.run("document.getElementById('prompt').value") == "And now?"
    tab.run(
        "document.getElementById('prompt').value = ''; window.fetch = window.real; "
        "for (const name of ['tools', 'schema', 'system']) document.getElementById(name).value = ''"
    )


def upload(tab: Page, text: str) -> str:
    """Import a file; what the page says to it."""
    tab.run(
        "(text => { document.getElementById('status').textContent = ''; const files = new DataTransfer(); "
        "files.items.add(new File([text], 'c.json')); const box = document.getElementById('import-file'); "
        f"box.files = files.files; box.dispatchEvent(new Event('change')) }})({json.dumps(text)})"
    )
    said: str = tab.until("document.getElementById('status').textContent")
    return said


@needs_browser
def test_chats_of_another_tab_are_kept(tab: Page) -> None:
    store = "JSON.parse(localStorage.getItem('fleetfoot.conversations'))"
    tab.press("k", 2)  # a new chat
    say(tab, "Of this tab")
    tab.until(f"document.querySelectorAll('article').length == 2 && {DONE}")
    other = {"id": "other", "title": "Of another tab", "nodes": [{"role": "user", "parent": -1, "content": "x"}]}
    tab.run(
        f"localStorage.setItem('fleetfoot.conversations', JSON.stringify([{json.dumps(other)}, ...{store}])); "
        "dispatchEvent(new StorageEvent('storage', {key: 'fleetfoot.conversations'}))"
    )
    say(tab, "More")
    tab.until(f"document.querySelectorAll('article').length == 4 && {DONE}")
    kept = tab.run(f"{store}.map(one => [one.title, one.nodes.length])")
    assert kept[:2] == [["Of another tab", 1], ["Of this tab", 4]]
    assert tab.run(f"{store}[0].id") == "other"


@needs_browser
def test_conversations_are_exported_and_imported_and_files_are_checked(tab: Page) -> None:
    hostile = "<img src=x onerror=window.hacked=1> **b**"
    nodes = [
        {"role": "user", "parent": -1, "content": "hi"},
        {"role": "assistant", "parent": 0, "content": hostile, "toolCalls": [{"name": "<i>"}]},
    ]
    bad = [
        {},
        {"nodes": [{"role": "root", "parent": -1}]},
        {"nodes": [{"role": "user", "parent": 0}]},
        [],
        {"nodes": {}},
    ]
    for text in ("x", *map(json.dumps, bad)):
        assert "no conversations" in upload(tab, text)
    good = {"conversations": [{"title": "<b>T</b>", "nodes": nodes, "leaf": 1}]}
    assert "1 conversation imported" in upload(tab, json.dumps(good))
    assert articles(tab)[0] == "hi" and tab.run("document.querySelector('article strong').textContent") == "b"
    assert tab.run("document.querySelectorAll('article img, article i').length") == 0
    tab.run(
        "window.exported = []; window.real = URL.createObjectURL; "
        "URL.createObjectURL = blob => { window.exported.push(blob); return window.real.call(URL, blob) }"
    )
    tab.run("document.getElementById('export').click()")
    exported = json.loads(tab.run("window.exported[0].text()"))
    kept = exported["conversations"][0]
    assert (kept["title"], kept["nodes"][1]["content"], kept["leaf"]) == ("<b>T</b>", hostile, 1)
    assert tab.run("JSON.parse(localStorage.getItem('fleetfoot.conversations'))[0].title") == "<b>T</b>"
    assert f"{len(exported['conversations'])} conversation" in upload(tab, json.dumps(exported))
    assert tab.run("window.hacked") is None


@needs_browser
def test_long_calls_scroll_alone_and_hebrew_begins_at_the_right(tab: Page) -> None:
    call = {"id": "1", "name": "search", "arguments": json.dumps({"query": "words of a query " * 40})}
    hebrew = "\u05e9\u05dc\u05d5\u05dd, Fleetfoot!\n\n- \u05d0\n\n```\nx = 1\n```"
    nodes = [
        {"role": "user", "parent": -1, "content": hebrew},
        {"role": "assistant", "parent": 0, "content": hebrew, "toolCalls": [call]},
    ]
    upload(tab, json.dumps({"nodes": nodes}))
    log = "document.getElementById('messages')"
    for width in (360, 1280):
        tab.resize(width, 800)
        assert tab.run(f"{log}.scrollWidth <= {log}.clientWidth"), width
    direction = "getComputedStyle(document.querySelector('article.assistant ' + {})).direction"
    found = [tab.run(direction.format(json.dumps(one))) for one in ("p", "ul", ".code pre", ".call")]
    assert found == ["rtl", "rtl", "ltr", "ltr"]


@needs_browser
def test_markdown_is_text_and_known_elements_alone(tab: Page, watched: RunningServer) -> None:
    render = (
        f"import('{watched.url}/page/markdown.js').then(({{markdown}}) => {{ "
        "const box = document.createElement('div'); box.append(...markdown(TEXT)); document.body.append(box); "
        "const named = one => [one.localName, ...[...one.attributes].map(a => a.name + '=' + a.value)]; "
        "const found = [box.innerHTML, box.textContent, [...box.querySelectorAll('*')].map(named)]; "
        "box.remove(); return found })"
    )
    for text, expected in MARKDOWN.items():
        assert tab.run(render.replace("TEXT", json.dumps(text)))[0] == expected, text
    allowed = {
        *(
            "p",
            "code",
            "pre",
            "a",
            "span",
            "strong",
            "em",
            "del",
            "br",
            "div",
            "button",
            "table",
            "thead",
            "tbody",
            "tr",
        ),
        *("th", "td", "ul", "ol", "li", "blockquote", "hr", "h3", "h4", "h5", "h6", "h7", "h8"),
    }
    names = {"class", "type", "tabindex", "href", "rel", "target", "start", "dir"}
    for text in XSS:
        _, shown, elements = tab.run(render.replace("TEXT", json.dumps(text)))
        for name, *attributes in elements:
            assert name in allowed, (text, name)
            for attribute in attributes:
                key, _, value = attribute.partition("=")
                assert key in names, (text, attribute)
                assert key != "href" or value.startswith(("https://", "http://", "mailto:")), (text, attribute)
        assert shown or "javascript" in text
    assert tab.run("window.hacked") is None
    link = tab.run(render.replace("TEXT", json.dumps("[a](https://b.example/c?d=1)")))[0]
    assert 'href="https://b.example/c?d=1"' in link and "noopener" in link
    tab.run(render.replace("TEXT", json.dumps("*" * 4000 + "[" * 4000 + "`" * 4001 + "> " * 3000)))  # in time


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(360, 640), (1280, 800), (3840, 2160)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_at_any_size(tab: Page, width: int, height: int, scheme: str) -> None:
    tab.resize(width, height, scheme=scheme)
    for view in ("chat", "live"):
        tab.run(f"document.getElementById('tab-{view}').click()")
        assert tab.run("document.documentElement.scrollWidth <= innerWidth"), view
        cut = tab.run(
            f"[...document.querySelectorAll('header button, #{view} button, #{view} input, #{view} canvas')]"
            ".filter(one => { const box = one.getBoundingClientRect(); "
            "return box.width && (box.left < -1 || box.right > innerWidth + 1) }).map(one => one.id)"
        )
        assert cut == []
    light = tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light == (scheme == "light")
    tab.run("document.getElementById('tab-chat').click()")
    tab.resize(1280, 800)


@needs_browser
def test_settings_that_cover_a_small_screen_are_closed(tab: Page) -> None:
    is_covered = "!document.getElementById('settings').hidden"
    tab.resize(360, 640)
    if not tab.run(is_covered):
        tab.run("document.getElementById('toggle-settings').click()")
    tab.run("document.getElementById('close-settings').click()")
    assert tab.run(f"[{is_covered}, document.activeElement.id]") == [False, "toggle-settings"]
    tab.run("document.getElementById('toggle-settings').click(); document.getElementById('menu').click()")
    assert not tab.run(is_covered)
    tab.run("document.getElementById('menu').click(); document.getElementById('api-key').value = 'wrong'")
    tab.run("document.getElementById('api-key').dispatchEvent(new Event('change'))")
    tab.until(f"{is_covered} && document.activeElement.id == 'api-key'")  # it is asked for
    tab.run("document.getElementById('api-key').value = 'chat-key'")
    tab.run("document.getElementById('api-key').dispatchEvent(new Event('change'))")
    tab.until(f"!({is_covered})")
    tab.resize(1280, 800)


@needs_browser
def test_keyboard_and_screen_reader(tab: Page) -> None:
    nodes = tab.accessibility()
    roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
    nameless = [
        role for role, name in roles if role in ("button", "textbox", "tab", "combobox", "checkbox", "log") and not name
    ]
    assert nameless == []
    assert {("tab", "Chat"), ("tab", "Engine"), ("log", "Messages"), ("navigation", "Conversations")} <= {*roles}
    tab.run("document.getElementById('tab-chat').focus()")
    tab.press("ArrowRight")
    assert tab.run("[document.activeElement.id, document.getElementById('live').hidden]") == ["tab-live", False]
    tab.press("1", modifiers=1)
    assert tab.run("document.getElementById('chat').hidden") is False
    tab.run("document.body.focus(); document.querySelector('.skip').focus()")
    assert tab.run("document.querySelector('.skip').getBoundingClientRect().width") > 50


@needs_browser
def test_the_engine_is_drawn_while_it_works(tab: Page, tmp_path: Path) -> None:
    tab.run("document.getElementById('tab-live').click(); document.getElementById('admin-key').value = 'wrong'")
    tab.run("document.getElementById('admin').requestSubmit()")
    tab.until("document.getElementById('live-status').textContent.includes('missing or wrong')")
    tab.run(
        "document.getElementById('admin-key').value = 'admin-key'; document.getElementById('admin').requestSubmit()"
    )
    tab.until("document.getElementById('live-status').textContent == 'Watching.'")
    body = {"prompt": "Once", "max_tokens": 40, "n": 3, "ignore_eos": True}
    headers = {"Content-Type": "application/json", **bearer("chat-key")}
    options = {"method": "POST", "headers": headers, "body": json.dumps(body)}
    tab.run(f"fetch('v1/completions', {json.dumps(options)}).then(one => one.json())")
    tab.until("/length/.test(document.getElementById('numbers').textContent)")
    tab.until("/[1-9]/.test(document.getElementById('steps').getAttribute('aria-label'))")
    colours = tab.run(
        "['steps', 'lanes', 'rates', 'ttft', 'itl'].map(id => { const one = document.getElementById(id); "
        "const { data } = one.getContext('2d').getImageData(0, 0, one.width, one.height); const seen = new Set(); "
        "for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) seen.add(data.slice(i, i + 3).join()); "
        "return seen.size })"
    )
    assert min(colours) >= 2, colours
    assert "Model Runner" in tab.run("document.getElementById('plan').innerText")
    tab.run(
        "window.saved = []; window.real = URL.createObjectURL; "
        "URL.createObjectURL = blob => { window.saved.push(blob); return window.real.call(URL, blob) }"
    )
    tab.run("document.getElementById('trace').click()")
    tab.until("window.saved.length == 1 && !document.getElementById('trace').disabled")
    assert json.loads(tab.run("window.saved[0].text()"))["displayTimeUnit"] == "ms"
    assert "blocks" in tab.run("document.getElementById('kv').innerText")
    tab.run("document.getElementById('tab-chat').click()")  # nobody looks
    assert tab.run("document.getElementById('pause').disabled")
    assert [one for one in tab.problems if "401" not in one] == []
