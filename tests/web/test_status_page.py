"""The status page in headless Chromium, on a live run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from tests.web.browser import Tab, browser_tab, chromium
from worker.http.pages import operations
from worker.http.server import WebServer
from worker.metrics.observer import Metrics
from worker.simulation.demo.run import Demo, DemoSettings
from worker.stream.settings import Arm
from worker.web.status import status_routes

SHOWN = "Number(document.body?.dataset.shown ?? 0)"
HOSTILE = "<img src=x onerror=alert(1)>"

#: Texts with too little contrast against their background: below 4.5, or 3 for large ones.
FAINT = """
(() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (c) => [0, 1, 2].map((i) => c[i] / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest(".hidden, .skip, noscript")) continue;
    const style = getComputedStyle(element);
    const ink = parse(element.closest("svg") ? style.fill : style.color);
    const ground = behind(element.closest("svg")?.parentElement ?? element);
    const [a, b] = [light(over(ink, ground)), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) found.push(`${text}: ${ratio.toFixed(2)}`);
  }
  return found;
})()
"""


@dataclass(slots=True)
class Scene:
    """A demo that is advanced by hand, and the address of its page."""

    demo: Demo
    url: str

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.demo.step()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    chromium()  # skip before the demo runs
    metrics = Metrics()
    metrics.learning(here=True)
    demo = Demo(DemoSettings(users=20, episodes=1000), metrics=metrics)
    routes = {**operations(metrics.registry, lambda: None), **status_routes(metrics, runner="demo")}
    with WebServer(routes) as server:
        scene = Scene(demo, server.url)
        scene.advance(60 * 14)
        yield scene


def see(script: Callable[[Tab], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with browser_tab() as tab:
            await script(tab)

    asyncio.run(whole())


def test_the_page_shows_a_live_run_on_every_screen_size_without_errors(scene):
    async def script(tab: Tab) -> None:
        await tab.open(scene.url)
        await tab.until(SHOWN)
        await charts_are_drawn(tab)
        await figures_match_the_run(tab, scene)
        await page_is_live(tab, scene)
        for width, dark in ((1280, False), (1280, True), (800, False), (320, True), (320, False)):
            await tab.resize(width, 800)
            await tab.prefer(dark=dark)
            await tab.until("document.getAnimations().length === 0")
            assert await tab.look("document.documentElement.scrollWidth") <= width
            assert await tab.look(FAINT) == []
        assert tab.errors == []
        assert {url.rsplit("/", 1)[0] for url in tab.requests} == {scene.url}

    see(script)


async def charts_are_drawn(tab: Tab) -> None:
    for chart, least in (("regret", 3), ("revenue", 3), ("explore", 1)):
        curves = await tab.look(
            f"[...document.querySelectorAll('#chart-{chart} .curve')].map((one) => one.getAttribute('d'))"
        )
        assert len(curves) >= least
        assert all(path.startswith("M") and path.count("L") >= 8 and "NaN" not in path for path in curves)
    assert await tab.look("document.querySelectorAll('#positions tbody tr').length") == 5
    assert await tab.look("document.querySelectorAll('#arms tbody .range u').length") == 10


async def figures_match_the_run(tab: Tab, scene: Scene) -> None:
    assert await tab.text("version") == f"v{scene.demo.parameters.version}"
    assert await tab.text("pill-text") == "Serving"
    text = await tab.look("document.body.innerText")
    assert "balanced" in text
    assert "NaN" not in text
    assert "undefined" not in text
    assert "demo · simulated users · personal model · aucbbp" in text
    assert "If the model is right" in await tab.text("regret-lead")
    assert "What decides between ads: x[1] … x[5] (" in await tab.text("arms-lead")


async def page_is_live(tab: Tab, scene: Scene) -> None:
    scene.advance(61)
    version = f"v{scene.demo.parameters.version}"
    await tab.until(f"document.getElementById('version').textContent === {version!r}")
    await tab.look("document.getElementById('pause').click()")
    assert await tab.look("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    await tab.until("document.getElementById('pill-text').textContent === 'Paused'")
    await tab.look("document.getElementById('pause').click()")
    await tab.until("document.getElementById('pill-text').textContent === 'Serving'")


def test_the_page_works_with_a_keyboard_and_a_screen_reader(scene):
    async def script(tab: Tab) -> None:
        await tab.open(scene.url)
        await tab.until(SHOWN)
        nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
        named = [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]
        ]
        roles = {role for role, _ in named}
        landmarks = {"banner", "main", "contentinfo", "navigation", "region"}
        assert roles >= landmarks | {"table", "heading", "button", "status"}
        unnamed = [
            role for role, name in named if role in ("button", "link", "image", "region", "navigation") and not name
        ]
        assert unnamed == []
        pictures = [name for role, name in named if role == "image" and "windows from" in name]
        assert len(pictures) == 3
        assert all("latest: " in name for name in pictures)
        # Every focusable element is reached by Tab, and shows a focus ring.
        reached = []
        for _ in range(14):
            await tab.press("Tab")
            reached.append(
                await tab.look(
                    "(() => { const at = document.activeElement; return [at.className || at.id || at.tagName, "
                    "getComputedStyle(at).outlineStyle]; })()"
                )
            )
        assert [name for name, _ in reached].count("plot") == 3
        assert {"skip", "pause"} <= {name for name, _ in reached}
        assert all(ring != "none" for name, ring in reached if name != "BODY")
        # A chart announces single windows, and has its numbers in a table.
        await tab.look("document.querySelector('#chart-regret .plot').focus()")
        await tab.press("ArrowLeft")
        spoken = await tab.look("document.querySelector('#chart-regret [aria-live]').textContent")
        assert all(word in spoken for word in ("pseudo", "posterior", "bound"))
        assert await tab.look("!document.querySelector('#chart-regret .tip').hidden")
        await tab.look("document.querySelector('#chart-regret details').open = true")
        rows = await tab.until("document.querySelectorAll('#chart-regret tbody tr').length")
        assert rows == len(scene.demo.rows)
        assert tab.errors == []

    see(script)


def test_problems_are_shown_and_arm_names_are_never_markup(scene):
    metrics = Metrics()
    arms = (Arm(arm=HOSTILE, reward=1.0), *scene.demo.parameters.arms[1:])
    changed = replace(scene.demo.parameters, made_at=1_700_000_000_000, kept=0.3)
    metrics.version(replace(changed, arms=arms, frozen=True))
    metrics.troubles.set("watermark-stalled", f"partition 3, {HOSTILE}")
    metrics.troubles.add("wrong-key", "arrivals, partition 1, offset 2", 20)

    async def script(tab: Tab) -> None:
        await tab.open(server.url)
        await tab.until(SHOWN)
        assert HOSTILE in await tab.text("arms")
        assert "noticed at 22:13: older sessions now count 0.3" in await tab.text("facts")
        assert await tab.look("document.querySelectorAll('#arms img').length") == 0
        problems = await tab.text("problems")
        assert "frozen" in problems
        assert "Not ready: recovering." in problems
        assert await tab.text("pill-text") == "Needs attention"
        for part in (
            "watermark-stalled",
            f"Partition 3, {HOSTILE}.",
            "wrong-key",
            "offset 2.",
            "To do: Write every arrival",
        ):
            assert part in problems
        levels = await tab.look("[...document.querySelectorAll('#problems li')].map((one) => one.dataset.level)")
        assert levels == ["bad", "bad", "warn", "warn"]
        metrics.troubles.set("watermark-stalled", "partition 4")
        await tab.until("document.getElementById('problems').innerText.includes('Partition 4.')")
        for width, dark in ((1280, False), (1280, True), (320, False)):
            await tab.resize(width, 800)
            await tab.prefer(dark=dark)
            assert await tab.look("document.documentElement.scrollWidth") <= width
            assert await tab.look(FAINT) == []
        assert "Shown after two closed windows" in await tab.text("chart-regret")
        assert tab.errors == []

    with WebServer(status_routes(metrics, unready=lambda: "recovering")) as server:
        see(script)
