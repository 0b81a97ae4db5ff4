"""The page of a report in a real browser: it draws, it answers, it asks nothing of anybody."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.compress import compress
from flows.config import CompressConfig
from tasks.html import html
from tests.tasks import reports

pytest.importorskip("selenium", reason="needs selenium: pip install -e .[dev]")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser import CHROMIUM, DRIVER, MISSING, PATIENCE, chromium, photograph, prefer, requested, resize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING),
]
Driver = webdriver.Chrome
WIDE, NARROW = (1280, 900), (360, 740)  # pixels; the latter is a small phone's
SHOWN = "figure:not([hidden]) .plot"


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with chromium(*WIDE) as one:
        yield one


@pytest.fixture(scope="module")
def page(
    prefect_server: None, tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., CompressConfig]
) -> Path:
    """A real run's: two targets, two seeds, two learning rates each."""
    folder = tmp_path_factory.mktemp("browser")
    training = {"epochs": 1, "batch_sequences": 8, "learning_rate": [1e-3, 3e-2]}
    targets = [{"ratio": 0.3}, {"ratio": 0.3, "objective": "task"}]
    compress(tiny_config(folder, seeds=[0, 1], training=training, targets=targets))
    return folder / "output" / "report.html"


@pytest.fixture
def opened(driver: Driver, page: Path) -> Driver:
    """The real run's page, wide, on a machine that prefers light."""
    return visit(driver, page)


def visit(driver: Driver, page: Path, scheme: str = "light") -> Driver:
    prefer(driver, scheme)
    resize(driver, *WIDE)
    driver.get("about:blank")
    for log in ("browser", "performance"):
        driver.get_log(log)
    driver.get(page.as_uri())
    return driver


def find(driver: Driver, selector: str) -> list[Any]:
    return driver.find_elements(By.CSS_SELECTOR, selector)


def wait(driver: Driver, condition: Callable[[Driver], Any]) -> Any:
    return WebDriverWait(driver, PATIENCE, poll_frequency=0.1).until(condition)


def draw_all(driver: Driver) -> list[Any]:
    """Scrolls to every figure that is shown, waits until it is drawn, and returns them."""
    plots = find(driver, SHOWN)
    for plot in plots:
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
        wait(driver, lambda _, plot=plot: plot.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace"))
    return plots


def check_silence(driver: Driver, page: Path) -> None:
    """Nothing in the console, and nothing asked for but the page itself and what lies in it."""
    assert driver.get_log("browser") == []
    addresses = requested(driver)
    assert page.as_uri() in addresses
    assert [address for address in addresses if address != page.as_uri() and not address.startswith("data:")] == []


def colour(driver: Driver, selector: str, name: str = "backgroundColor") -> str:
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return str(driver.execute_script(script, selector, name))


def test_a_real_run_is_drawn_without_a_word_or_a_request(opened: Driver, page: Path) -> None:
    plots = draw_all(opened)
    assert len(plots) >= 8  # curves by kind, ranks, costs, trainings, lineage
    for plot in plots:
        assert plot.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace path")
        assert plot.size["width"] <= plot.find_element(By.XPATH, "..").size["width"]
    for table in find(opened, "main > section > .scroll > table"):
        assert len(table.find_elements(By.CSS_SELECTOR, "tbody tr")) >= 2
    assert find(opened, ".stage") != []
    check_silence(opened, page)


@pytest.mark.parametrize("name", list(reports.CONTENTS))
def test_every_kind_of_report_is_drawn(driver: Driver, tmp_path: Path, name: str) -> None:
    content = reports.CONTENTS[name]()
    page = tmp_path / "report.html"
    page.write_text(html(content, reports.curves(content), {}), encoding="utf-8")
    visit(driver, page)
    draw_all(driver)
    assert driver.title == f"{content['model'].removeprefix('./')}, compressed"  # no code in a name has run
    assert find(driver, "img, a[href^='javascript']") == []
    check_silence(driver, page)


def test_a_name_in_a_figure_is_shown_as_it_is(driver: Driver, tmp_path: Path) -> None:
    content = reports.hostile()
    page = tmp_path / "report.html"
    page.write_text(html(content, {}, {}), encoding="utf-8")
    draw_all(visit(driver, page))
    shown = [one.get_attribute("textContent") for one in find(driver, "#rank-charts .legendtext")]
    assert shown == [unit["name"].rpartition(".")[2] for unit in content["units"][: len(shown)]]
    assert any("onerror" in text for text in shown)


def test_the_toggle_changes_the_page_and_its_figures_and_remembers_nothing(opened: Driver, page: Path) -> None:
    (button,) = find(opened, "#scheme")
    draw_all(opened)

    def colours() -> tuple[str, ...]:
        line = colour(opened, ".plot .scatterlayer .trace .js-line", "stroke")
        return colour(opened, "html"), colour(opened, ".plot .main-svg", "backgroundColor"), line

    light = colours()
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    wait(opened, lambda _: all(a != b for a, b in zip(colours(), light, strict=True)))
    dark = colours()
    button.click()
    wait(opened, lambda _: colours() == light)
    button.click()
    opened.refresh()
    draw_all(opened)
    assert colours() == light
    prefer(opened, "dark")  # the machine changes its mind: the page follows
    wait(opened, lambda _: colours() == dark)
    visit(opened, page, "dark")
    draw_all(opened)
    assert colours() == dark
    assert opened.execute_script("return [document.cookie, localStorage.length]") == ["", 0]


def test_an_entry_of_a_legend_hides_its_line_and_the_scheme_keeps_it_hidden(opened: Driver) -> None:
    plot = draw_all(opened)[0]

    def lines() -> int:
        return len(plot.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace"))

    before = lines()
    entry = plot.find_element(By.CSS_SELECTOR, ".legendtoggle")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    webdriver.ActionChains(opened).move_to_element(entry).click().perform()
    wait(opened, lambda _: lines() == before - 1)
    find(opened, "#scheme")[0].click()
    time.sleep(0.5)
    assert lines() == before - 1


def test_a_reader_chooses_seed_and_target(opened: Driver) -> None:
    seeds, targets = (Select(one) for one in find(opened, "select"))
    assert [option.text for option in seeds.options] == ["seed 0", "seed 1"]
    assert len(targets.options) == 2  # the objective changes no rank
    for chooser, place in ((seeds, "#kl-charts"), (targets, "#rank-charts")):
        everything = find(opened, f"{place} > figure")
        before = [one.is_displayed() for one in everything]
        assert before.count(True) == len(everything) // 2
        chooser.select_by_index(1)
        assert [one.is_displayed() for one in everything] == [not shown for shown in before]
    draw_all(opened)


def test_hovering_says_which_unit_and_how_much(opened: Driver) -> None:
    plot = draw_all(opened)[0]
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    point = plot.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace .point")[0]
    webdriver.ActionChains(opened).move_to_element(point).perform()
    said = wait(opened, lambda _: plot.find_element(By.CSS_SELECTOR, ".hovertext").get_attribute("textContent"))
    assert said.startswith("model.layers.")
    for part in ("k = ", "removed", "KL ", "nats per token"):
        assert part in said


def test_a_phone_scrolls_down_only(opened: Driver) -> None:
    resize(opened, *NARROW)
    draw_all(opened)
    assert opened.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [NARROW[0]] * 2
    for plot in find(opened, "#kl-charts .plot"):
        assert plot.size["width"] < NARROW[0]
        assert plot.get_property("scrollWidth") <= plot.size["width"]
    for details in find(opened, "details"):
        opened.execute_script("arguments[0].open = true", details)
    assert opened.execute_script("return document.documentElement.scrollWidth") == NARROW[0]


def test_keys_are_enough(opened: Driver) -> None:
    def press(*keys: str) -> Any:
        webdriver.ActionChains(opened).send_keys(*keys).perform()
        return opened.switch_to.active_element

    assert press(Keys.TAB).get_attribute("class") == "skip"
    assert press(Keys.TAB).get_attribute("id") == "scheme"
    press(Keys.SPACE)
    assert opened.execute_script("return document.documentElement.dataset.scheme") == "dark"
    reached = [press(Keys.TAB) for _ in range(14)]
    assert {"A", "DIV", "SELECT"} <= {one.tag_name.upper() for one in reached}  # sections, a table's frame, the seed
    chooser = next(one for one in reached if one.tag_name == "select")
    chooser.send_keys(Keys.ARROW_DOWN)
    assert Select(chooser).first_selected_option.text == "seed 1"
    summary = find(opened, SHOWN.replace(".plot", "summary"))[0]
    summary.send_keys(Keys.ENTER)
    assert summary.find_element(By.XPATH, "..").get_attribute("open") == "true"
    assert summary.find_element(By.XPATH, "..//tbody/tr").is_displayed()


def test_a_link_to_a_stage_opens_what_is_said_of_it(opened: Driver) -> None:
    link = find(opened, "#stages ~ .scroll tbody a")[3]
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", link)
    link.click()
    target = opened.find_element(By.ID, link.get_attribute("href").partition("#")[2])
    wait(opened, lambda _: target.is_displayed())
    assert "key" in target.text


def test_a_picture_of_a_page_is_taken(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    photograph(page, picture, width=1280, height=700, scheme="dark")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (1280, 700)
