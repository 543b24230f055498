// The page: its two views, keys, colours and shortcuts.

import { Chat } from "./chat.js";
import { Live } from "./live.js";
import { request } from "./stream.js";

const $ = (id) => document.getElementById(id);
const THEMES = ["system", "light", "dark"];

function stored(storage, name) {
  try {
    return storage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

function store(storage, name, value) {
  try {
    if (value) storage.setItem(name, value);
    else storage.removeItem(name);
  } catch {
    // a browser without storage: for this visit
  }
}

// --- views

const views = ["chat", "live"];

function showView(name) {
  for (const view of views) {
    const tab = $(`tab-${view}`);
    $(view).hidden = view !== name;
    tab.setAttribute("aria-selected", String(view === name));
    tab.tabIndex = view === name ? 0 : -1;
  }
  $("menu").hidden = name !== "chat";
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  live.setVisible(name === "live");
}

for (const view of views) {
  $(`tab-${view}`).addEventListener("click", () => showView(view));
  $(`tab-${view}`).addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const other = views[1 - views.indexOf(view)];
      showView(other);
      $(`tab-${other}`).focus();
    }
  });
}

function expand(button, panel) {
  panel.hidden = !panel.hidden;
  button.setAttribute("aria-expanded", String(!panel.hidden));
}

const toggleSettings = () => expand($("toggle-settings"), $("settings"));
// where they cover the chat
const closeSettings = () => $("settings").hidden || !matchMedia("(max-width: 60rem)").matches || toggleSettings();

$("toggle-settings").addEventListener("click", toggleSettings);
$("close-settings").addEventListener("click", () => {
  closeSettings();
  $("toggle-settings").focus();
});
$("menu").addEventListener("click", () => {
  closeSettings();
  const isOpen = $("side").classList.toggle("open");
  $("menu").setAttribute("aria-expanded", String(isOpen));
});
$("conversations").addEventListener("click", () => {
  $("side").classList.remove("open");
  $("menu").setAttribute("aria-expanded", "false");
});

// --- colours

function setTheme(name) {
  const theme = THEMES.includes(name) ? name : "system";
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-label", `Colours: ${theme === "system" ? "as the system" : theme}`);
  store(localStorage, "fleetfoot.theme", theme === "system" ? "" : theme);
  live.redraw();
}

$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]));

// --- keys and models

const getKey = () => $("api-key").value.trim();

function keepKey() {
  store(localStorage, "fleetfoot.key", $("keep-key").checked ? getKey() : "");
  store(sessionStorage, "fleetfoot.key", getKey());
}

async function listModels() {
  try {
    const { data } = await (await request("v1/models", { key: getKey() })).json();
    $("models").replaceChildren(...data.map((one) => new Option(one.id, one.id)));
    $("model").textContent = data[0]?.id ?? "";
    if (isKeyAsked) {
      isKeyAsked = false;
      $("status").textContent = "";
      closeSettings();
    }
  } catch (error) {
    if (error.status === 401) askKey();
    else $("status").textContent = `No models: ${error.message}`;
  }
}

let isKeyAsked = false;

function askKey() {
  isKeyAsked = true;
  if ($("settings").hidden) toggleSettings();
  $("status").textContent = "The server needs an API key: enter it in the settings.";
  $("api-key").focus();
}

$("api-key").addEventListener("change", () => {
  keepKey();
  listModels();
});
$("keep-key").addEventListener("change", keepKey);

// --- shortcuts

document.addEventListener("keydown", (event) => {
  const isCommand = event.ctrlKey || event.metaKey;
  if (event.key === "Escape") chat.stop();
  else if (isCommand && event.key.toLowerCase() === "k") {
    event.preventDefault();
    showView("chat");
    chat.begin();
  } else if (event.altKey && (event.key === "1" || event.key === "2")) {
    event.preventDefault();
    showView(views[Number(event.key) - 1]);
  }
});

$("api-key").value = stored(localStorage, "fleetfoot.key") || stored(sessionStorage, "fleetfoot.key");
$("keep-key").checked = Boolean(stored(localStorage, "fleetfoot.key"));
const chat = new Chat(getKey, askKey);
const live = new Live();
setTheme(stored(localStorage, "fleetfoot.theme"));
showView(views.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
listModels();
$("logprobs").addEventListener("change", () => chat.show());
