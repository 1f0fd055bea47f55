"""Fill in a web form in a real browser.

The task is an order in words, such as "Order 3 blue mugs for Ada, to be delivered on Monday." The model reads the page
as its accessibility tree with `read`, and uses `fill`, `choose`, `check` and `press`. The reward is 1 if the browser
submitted exactly this order.

The forms differ in their fields, labels and order. Some have a second page, and some refuse the first way of writing a
value and say which one they accept. The pages come from this module: the browser has no network.

    rollouts run --env browser_form --model Qwen/Qwen3-0.6B
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import html
import random
import re
import shutil
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import parse_qsl

from rollouts.env import metric, reward, tool, tool_use
from rollouts.errors import ConfigError, ServiceLostError
from rollouts.types import Message, Score, Task

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Error, Locator, Page, Playwright, Route

__all__ = ["BrowserForm", "Chromium", "Field", "Form", "Site", "draw_order", "make_form", "sentence_of", "wanted"]

URL = "http://form.test/"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT_SECONDS = 20.0  # how long the browser may take for one action
TEXT_MAX = 1000  # characters of a field
DEMONSTRATIONS_MAX = 1000  # so many are remembered
INSTRUCTIONS = "Use the form in the browser, and press its last button when every field is right."

OPTIONS = {
    "thing": ("bowl", "mug", "plate", "vase"),
    "color": ("blue", "green", "red", "white"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"),
}
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Iris Jon".split()
WORDS = ("Get well", "Good luck", "Thank you")
LABELS = {
    "thing": ("Product", "Article", "What do you need?"),
    "amount": ("Quantity", "How many?", "Number of pieces"),
    "color": ("Color", "Which color?", "Paint"),
    "name": ("Name", "Recipient", "Who is it for?"),
    "day": ("Delivery day", "When?", "Bring it on"),
    "phone": ("Phone", "Telephone number", "Where can we call?"),
    "gift": ("Gift wrap", "This is a gift", "Wrap it"),
    "card": ("Card", "Words on the card", "Message"),
}
TITLES = ("Order", "Shop", "Pottery")
BUTTONS = ("Send", "Order now", "Submit")


class Rule(NamedTuple):
    """A way of writing a value that a form insists on: a pattern, what the page says, and how to write it."""

    pattern: str
    words: str
    write: Callable[[str], str]


RULES = {
    "amount": Rule(r"[0-9]{2}", "Write two digits, such as 07.", lambda text: text.zfill(2)),
    "name": Rule(r"[A-Z]+", "Write capital letters.", str.upper),
    "phone": Rule(r"[0-9]+", "Write digits without spaces.", lambda text: text.replace(" ", "")),
}


class Field(NamedTuple):
    """A field of a form: its name in what is submitted, its label, and its kind: text, select, radio or box."""

    name: str
    label: str
    kind: str


class Form(NamedTuple):
    """The fields of each page, the button of each page, and the name of the field with a rule, or an empty text."""

    title: str
    pages: list[list[Field]]
    buttons: list[str]
    rule: str


@dataclass
class BrowserForm:
    """Fill in web forms in a real browser."""

    async_library: ClassVar[str] = "asyncio"  # as Playwright's API
    reward_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    fields: int = 5  # how many things an order says: 2 to 7
    pages: int = 2  # at most so many pages: 1 or 2
    corrections: bool = True  # whether some forms refuse the first way of writing a value
    browser: str = ""  # the program of Chromium; by default the one of Playwright, or else one on the PATH

    def __post_init__(self) -> None:
        if not 2 <= self.fields <= 7:
            raise ConfigError(f"--env.fields {self.fields}: expected 2 to 7")
        if self.pages not in (1, 2):
            raise ConfigError(f"--env.pages {self.pages}: expected 1 or 2")
        self._opening: asyncio.Future[Page] | None = None

    async def shared(self) -> AsyncIterator[Chromium]:
        """The browser, which all episodes of the process use."""
        chromium = Chromium(self.browser)
        try:
            await chromium.open()
            yield chromium
        finally:
            await chromium.close()

    def tasks(self, split: str, rng: random.Random, shared: Chromium) -> Iterator[Task]:
        """Endless orders. A fifth of all orders is for evaluation. It names `shared`, so that a run without a browser
        ends before a model loads.
        """
        return self._draw(split, rng)

    def demonstrations(self, split: str, rng: random.Random, shared: Chromium) -> Iterator[list[Message]]:
        """Endless conversations of an expert, who fills in the form in the browser. An order that was drawn before is
        not played again.
        """
        known: dict[str, list[Message]] = {}
        for task in self._draw(split, rng):
            prompt = str(task.prompt)
            talk = known.get(prompt) or shared.wait_for(self._demonstrate(task, shared))
            if len(known) < DEMONSTRATIONS_MAX:
                known[prompt] = talk
            yield list(talk)

    async def setup(self, task: Task, shared: Chromium) -> None:
        self.wanted, form = self._form(task)
        self.site = Site(form)
        self._opening = asyncio.ensure_future(shared.page(self.site))  # `close` waits for it, also if this is cancelled
        self.page = await asyncio.shield(self._opening)

    async def close(self) -> None:
        """Close the page with its context, which has its cookies and its storage."""
        if self._opening is not None:
            with contextlib.suppress(ServiceLostError):
                page = await self._opening
                with browser_errors():
                    await page.context.close()

    @tool
    async def read(self) -> str:
        """Read the page."""
        with browser_errors():
            return await self.page.locator("body").aria_snapshot()

    @tool
    async def fill(self, field: str, text: str) -> str:
        """Write a text into a textbox, in place of what it holds.

        Args:
            field: the name of the textbox
            text: what to write
        """
        if len(text) > TEXT_MAX:
            raise ValueError(f"the text has {len(text)} characters; a field takes at most {TEXT_MAX}")
        with browser_errors():
            box = await self._find(self.page.get_by_role("textbox"), "textbox", field)
            await box.fill(text)
            return f"{field}: {await box.input_value()}"

    @tool
    async def choose(self, field: str, option: str) -> str:
        """Choose an option of a combobox or of a radiogroup.

        Args:
            field: the name of the combobox or radiogroup
            option: the name of the option
        """
        with browser_errors():
            both = self.page.get_by_role("combobox").or_(self.page.get_by_role("radiogroup"))
            found = await self._find(both, "combobox or radiogroup", field)
            options = found.get_by_role("option").or_(found.get_by_role("radio"))
            chosen = await self._find(options, f"option of {field}", option)
            if await found.evaluate("each => each.tagName") == "SELECT":
                await found.select_option(label=option)
            else:
                await chosen.check()
            return f"{field}: {option}"

    @tool
    async def check(self, field: str, on: bool = True) -> str:
        """Check or clear a checkbox, and read the page, which may have other fields then.

        Args:
            field: the name of the checkbox
            on: false to clear it
        """
        with browser_errors():
            box = await self._find(self.page.get_by_role("checkbox"), "checkbox", field)
            await box.set_checked(on)
        return await self.read()

    @tool
    async def press(self, button: str) -> str:
        """Press a button, and read the page that follows.

        Args:
            button: the name of the button
        """
        with browser_errors():
            found = await self._find(self.page.get_by_role("button"), "button", button)
            async with self.page.expect_event("domcontentloaded"):
                await found.click()
        return await self.read()

    @reward
    async def ordered(self) -> Score:
        """1 if exactly the order of the task was submitted, else 0. The parts say whether anything was submitted, and
        which share of the fields was right. Raises ServiceLostError if the browser died before anything was submitted.
        """
        got = self.site.submitted
        if got is None:
            with browser_errors():
                await self.page.evaluate("1")
        right = sum((got or {}).get(name) == value for name, value in self.wanted.items())
        parts = {"submitted": float(got is not None), "fields": right / len(self.wanted | (got or {}))}
        return Score(float(got == self.wanted), parts)

    @metric
    def refusals(self) -> float:
        """How often the page refused what was filled in."""
        return float(self.site.refusals)

    def _draw(self, split: str, rng: random.Random) -> Iterator[Task]:
        while True:
            order = draw_order(rng, self.fields)
            prompt = f"{sentence_of(order)}\n{INSTRUCTIONS}"
            if (zlib.crc32(prompt.encode()) % 5 == 0) == (split == "eval"):
                yield Task(prompt, info={"order": order})

    def _form(self, task: Task) -> tuple[dict[str, str], Form]:
        order = task.info["order"]
        form = make_form(order, pages=self.pages, corrections=self.corrections)
        return wanted(order, form), form

    async def _find(self, among: Locator, what: str, name: str) -> Locator:
        """The visible one with this name. Raises ValueError with the names that there are."""
        names = await among.evaluate_all("found => found.map(each => each.ariaLabel ?? each.textContent)")
        if name not in names:
            shown = f"there are {', '.join(map(repr, names))}" if names else "the page has none"
            raise ValueError(f"there is no {what} {name[:100]!r}; {shown}")
        return among.nth(names.index(name))

    async def _demonstrate(self, task: Task, shared: Chromium) -> list[Message]:
        """The conversation of an expert, with the results of the tools."""
        env, talk = dataclasses.replace(self), list(task.messages)
        await env.setup(task, shared)
        try:
            for number, (name, arguments) in enumerate(expert(*self._form(task), task.info["order"])):
                talk += tool_use(name, arguments, await getattr(env, name)(**arguments), number)
        finally:
            await env.close()
        return [*talk, Message("assistant", "Done.")]


# --- orders and forms -------------------------------------------------------------------------------------------------


def draw_order(rng: random.Random, fields: int) -> dict[str, str]:
    """What is ordered, by the names of the fields."""
    drawn = {name: rng.choice(values) for name, values in OPTIONS.items()}
    drawn |= {"amount": str(rng.randint(1, 9)), "name": rng.choice(NAMES), "phone": f"555 {rng.randrange(10_000):04}"}
    drawn |= {"gift": "on", "card": rng.choice(WORDS)}
    said = ["thing", "amount", *rng.sample(["color", "name", "day", "phone", "gift"], fields - 2)]
    said += ["card"] if "gift" in said and rng.random() < 0.5 else []
    return {name: value for name, value in drawn.items() if name in said}


def sentence_of(order: dict[str, str]) -> str:
    """The order in words.

    >>> sentence_of({"thing": "mug", "amount": "3", "color": "blue", "name": "Ada", "day": "Monday"})
    'Order 3 blue mugs for Ada, to be delivered on Monday.'
    """
    words = ["Order", order["amount"], order.get("color"), order["thing"] + "s" * (order["amount"] != "1")]
    text = " ".join(filter(None, words)) + (f" for {order['name']}" if "name" in order else "")
    text += f", to be delivered on {order['day']}" if "day" in order else ""
    text += f", with a call to {order['phone']} before" if "phone" in order else ""
    text += ", wrapped as a gift" if "gift" in order else ""
    return text + (f' with a card that says "{order["card"]}"' if "card" in order else "") + "."


def make_form(order: dict[str, str], *, pages: int = 2, corrections: bool = True) -> Form:
    """The form for an order. Equal orders have equal forms. It may have a checkbox that the order does not need."""
    rng = random.Random(sentence_of(order))
    names = [name for name in order if name not in ("gift", "card")]
    names += ["gift"] if "gift" in order or rng.random() < 0.3 else []
    rng.shuffle(names)
    fields = []
    for name in names:
        kind = rng.choice(("select", "radio")) if name in OPTIONS else "box" if name == "gift" else "text"
        fields.append(Field(name, rng.choice(LABELS[name]), kind))
    cut = rng.randrange(1, len(fields)) if pages == 2 and rng.random() < 0.5 else len(fields)
    found = [page for page in (fields[:cut], fields[cut:]) if page]
    ruled = [name for name in names if name in RULES]
    rule = rng.choice(ruled) if corrections and ruled and rng.random() < 0.5 else ""
    return Form(rng.choice(TITLES), found, [*["Next"] * (len(found) - 1), rng.choice(BUTTONS)], rule)


def wanted(order: dict[str, str], form: Form) -> dict[str, str]:
    """What the browser submits if the order is filled in rightly."""
    return {name: RULES[name].write(value) if name == form.rule else value for name, value in order.items()}


def expert(wanted: dict[str, str], form: Form, order: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls that fill in a form. A value that the page refuses is corrected afterwards."""
    yield "read", {}
    for page, button in zip(form.pages, form.buttons, strict=True):
        for field in page:
            if field.kind == "text":
                yield "fill", {"field": field.label, "text": order[field.name]}
            elif field.kind != "box":
                yield "choose", {"field": field.label, "option": order[field.name]}
            elif field.name in order:
                yield "check", {"field": field.label}
                if "card" in order:
                    yield "fill", {"field": card_of(field).label, "text": order["card"]}
        yield "press", {"button": button}
        for field in page:
            if order.get(field.name) != wanted.get(field.name):
                yield "fill", {"field": field.label, "text": wanted[field.name]}
                yield "press", {"button": button}


def card_of(box: Field) -> Field:
    """The text field that appears when the box is checked."""
    return Field("card", LABELS["card"][LABELS["gift"].index(box.label)], "text")


# --- the pages --------------------------------------------------------------------------------------------------------


class Site:
    """What answers the browser. `submitted` has the values of all pages once the last page accepted its values."""

    def __init__(self, form: Form) -> None:
        self.form, self.refusals = form, 0
        self.submitted: dict[str, str] | None = None
        self._page, self._given = 0, dict[str, str]()

    def answer(self, method: str, body: str) -> str:
        """The page that follows. `body` has the values that a form sends."""
        if self.submitted is not None:
            return _document(self.form.title, "<div>Thank you. The order was sent.</div>")
        if method != "POST":
            return self._show({}, {})
        values = {name: value.strip() for name, value in parse_qsl(body) if value.strip()}
        if problems := self._problems(values):
            self.refusals += 1
            return self._show(values, problems)
        self._given |= values
        self._page += 1
        if self._page == len(self.form.pages):
            self.submitted = self._given
            return self.answer(method, "")
        return self._show({}, {})

    def _problems(self, values: dict[str, str]) -> dict[str, str]:
        """By label, what must be changed on this page."""
        found = {}
        for field in self.form.pages[self._page]:
            value = values.get(field.name, "")
            if field.kind != "box" and not value:
                found[field.label] = "Fill in this field."
            elif field.name == self.form.rule and not re.fullmatch(RULES[field.name].pattern, value):
                found[field.label] = RULES[field.name].words
            elif field.name == "amount" and not re.fullmatch("[0-9]{1,4}", value):
                found[field.label] = "Write a number."
        return found

    def _show(self, values: dict[str, str], problems: dict[str, str]) -> str:
        alerts = "".join(
            f"<div role=alert>{html.escape(f'{label}: {words}')}</div>" for label, words in problems.items()
        )
        fields = "".join(_field(field, values) for field in self.form.pages[self._page])
        button = f"<button>{html.escape(self.form.buttons[self._page])}</button>"
        return _document(self.form.title, f"{alerts}<form method=post autocomplete=off>{fields}{button}</form>")


def _document(title: str, body: str) -> str:
    return f"<!doctype html><meta charset=utf-8><title>{title}</title><h1>{title}</h1>{body}"


def _field(field: Field, values: dict[str, str]) -> str:
    """A field in HTML. Its visible label is left out of the accessibility tree, which has its name already."""
    value, label = values.get(field.name, ""), html.escape(field.label)
    named = f'aria-label="{label}"'
    shown = f"<span aria-hidden=true>{label}</span>"
    if field.kind == "text":
        return f'<div>{shown} <input name={field.name} {named} value="{html.escape(value)}"></div>'
    if field.kind == "box":
        state, hidden = ("checked", "") if value else ("", "hidden disabled")
        toggle = "more.hidden = more.disabled = !this.checked"
        box = f'<input type=checkbox name={field.name} {named} {state} onchange="{toggle}">'
        return (
            f"<div>{box} {shown}</div><fieldset id=more role=none {hidden}>{_field(card_of(field), values)}</fieldset>"
        )
    if field.kind == "select":
        options = "".join(f"<option{' selected' * (each == value)}>{each}" for each in OPTIONS[field.name])
        return f'<div>{shown} <select name={field.name} {named}><option value="">choose{options}</select></div>'
    radios = "".join(
        f"<input type=radio name={field.name} value={each} aria-label={each}{' checked' * (each == value)}>"
        f"<span aria-hidden=true>{each}</span>"
        for each in OPTIONS[field.name]
    )
    return f"<div role=radiogroup {named}>{shown} {radios}</div>"


# --- the browser ------------------------------------------------------------------------------------------------------


class Chromium:
    """A headless browser, which is started again if it died. Its coroutines belong to the loop that called `open`."""

    __slots__ = ("_browser", "_loop", "_opening", "_playwright", "_program")

    def __init__(self, program: str = "") -> None:
        self._program, self._opening = program, asyncio.Lock()
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None

    async def open(self) -> None:
        """Start the browser. Raises ConfigError if there is none."""
        from playwright.async_api import async_playwright

        self._loop = asyncio.get_running_loop()
        with browser_errors():
            self._playwright = await async_playwright().start()
        self._browser = await _launch(self._playwright, self._program)

    async def page(self, site: Site) -> Page:
        """A page of the site in a context of its own. Raises ServiceLostError."""
        async with self._opening:
            try:
                context = await self._context()
            except ServiceLostError:  # an earlier episode may have lost the browser
                await self._restart()
                context = await self._context()
        try:
            with browser_errors():
                context.set_default_timeout(1000 * WAIT_SECONDS)
                await context.route("**/*", functools.partial(_answer, site))
                page = await context.new_page()
                await page.goto(URL)
        except BaseException:
            with contextlib.suppress(ServiceLostError), browser_errors():
                await context.close()
            raise
        return page

    async def _context(self) -> BrowserContext:
        """A new context, with cookies and storage of its own. Raises ServiceLostError."""
        if self._browser is None:
            raise ServiceLostError("the browser is closed")
        with browser_errors():
            return await self._browser.new_context(locale="en-US", service_workers="block", offline=True)

    async def _restart(self) -> None:
        await self.close()
        try:
            await self.open()
        except ConfigError as error:
            raise ServiceLostError(str(error)) from error

    def wait_for(self, coroutine: Any) -> Any:
        """The result of a coroutine on the browser's loop, for another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def close(self) -> None:
        """End the browser, also if it died."""
        browser, playwright = self._browser, self._playwright
        self._browser = self._playwright = None
        with contextlib.suppress(ServiceLostError), browser_errors():
            if browser is not None:
                await browser.close()
        with contextlib.suppress(ServiceLostError), browser_errors():
            if playwright is not None:
                await playwright.stop()


async def _launch(playwright: Playwright, program: str) -> Browser:
    """The browser `program`, or else the one of Playwright, or else one on the PATH. Raises ConfigError."""
    from playwright.async_api import Error

    own = playwright.chromium.executable_path
    paths = [program] if program else [own, *filter(None, map(shutil.which, BROWSERS))]
    said = []
    for path in paths:
        found = shutil.which(path)
        if found is None:
            said.append(f"{path}: there is no such program")
            continue
        try:
            # Pages need no network: no name and no address is resolved, also not for the browser itself.
            rules = "--host-resolver-rules=MAP * ~NOTFOUND"
            return await playwright.chromium.launch(executable_path=None if path == own else found, args=[rules])
        except Error as error:
            said.append(f"{path}: {_first_line(error)}")
    raise ConfigError(
        "the environment browser_form needs Chromium, and none could be started\n"
        + "\n".join(said)
        + "\ntype: playwright install chromium, or: apt install chromium, or name one: --env.browser /path/to/chromium"
    )


async def _answer(site: Site, route: Route) -> None:
    """Answer requests for the form, and refuse all others."""
    if route.request.url == URL:
        page = site.answer(route.request.method, route.request.post_data or "")
        await route.fulfill(body=page, content_type="text/html; charset=utf-8")
    else:
        await route.abort()


@contextlib.contextmanager
def browser_errors() -> Iterator[None]:
    """What Playwright raises becomes a ServiceLostError: arguments are checked before, so the browser has failed."""
    from playwright.async_api import Error

    try:
        yield
    except Error as error:
        raise ServiceLostError(f"the browser failed: {_first_line(error)}") from error


def _first_line(error: Error) -> str:
    return error.message.strip().partition("\n")[0].strip()
