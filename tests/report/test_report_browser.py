"""The page in a real browser: no error, no request, sorting by mouse and keyboard, no overflow on a phone."""

import base64
import os
import shutil

import pytest
from experiments.helpers_results import ENTRIES, document, drawn
from report.helpers_results import METHODS, classification, regression

from slimbayes.lab.experiments import write_result
from slimbayes.lab.experiments.pages import write_pages
from slimbayes.lab.report import write_report

selenium = pytest.importorskip("selenium")
CHROME, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROME and DRIVER), reason="chromium and chromedriver are not installed")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    os.environ.setdefault("SE_OFFLINE", "true")
    os.environ.setdefault("SE_AVOID_STATS", "true")
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.binary_location = CHROME
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    downloads = tmp_path_factory.mktemp("downloads")
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)}
    )
    driver.downloads = downloads
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    few = [METHODS[0], METHODS[1], METHODS[3], METHODS[6]]
    documents = {
        "images": classification(seeds=2, methods=few, shifts=["noise"]),
        "cubic": regression(seeds=2, methods=few, shifts=["noise"]),
    }
    documents["images"]["methods"][1]["label"] = "<script>window.broken = 1</script>"
    documents["images"]["methods"][2]["runs"][0]["clean"]["nll"] = None  # a value that is missing sorts last
    return {name: write_report(d, tmp_path_factory.mktemp(name)) for name, d in documents.items()}


def view(browser, path, width, height=900, scheme="light", media=""):
    # reduced motion: the driver clicks where it scrolled to, and does not wait for a smooth scroll to end
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())


def screenshot(browser, path):
    height = browser.execute_script("return document.body.scrollHeight")
    clip = {
        "x": 0,
        "y": 0,
        "width": browser.execute_script("return innerWidth"),
        "height": height,
        "scale": 1,
    }
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    path.write_bytes(base64.b64decode(shot["data"]))
    assert path.stat().st_size > 50_000


@pytest.mark.parametrize("name", ["images", "cubic"])
def test_no_error_and_no_request(browser, pages, name, tmp_path):
    browser.get_log("browser")
    view(browser, pages[name], 1280)
    screenshot(browser, tmp_path / f"{name}.png")
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert browser.execute_script("return window.broken") is None
    assert browser.title == browser.find_element("tag name", "h1").text
    broken = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert browser.execute_script(broken) == 0


@pytest.mark.parametrize("name", ["images", "cubic"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_horizontal_overflow_on_a_phone(browser, pages, name, scheme, tmp_path):
    view(browser, pages[name], 390, scheme=scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    inner = "const s = document.querySelector('#summary .scroll'); return s.scrollWidth > s.clientWidth"
    assert browser.execute_script(inner)  # the table scrolls within its own box
    tops = "return arguments[0].map(s => document.querySelector(s).getBoundingClientRect().top)"
    order = ["#verdict .lead", "#figure-difference svg", "#summary table", "#summary .findings"]
    assert (found := browser.execute_script(tops, order)) == sorted(found)
    right = "return document.querySelector('th button[data-name^=Shifted]').getBoundingClientRect().right"
    assert browser.execute_script(right) < 390  # in sight before anything scrolls
    screenshot(browser, tmp_path / f"{name}-{scheme}.png")


def test_pages_of_experiments(browser, tmp_path):
    write_result(drawn(), tmp_path / "results")
    write_result(document(), tmp_path / "results")
    write_pages(tmp_path / "results", tmp_path / "docs", ENTRIES)
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    browser.get_log("browser")
    for scheme in ("light", "dark"):
        view(browser, tmp_path / "docs" / "results.html", 390, scheme=scheme)
        browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        page = browser.execute_script(style, "body", "backgroundColor")
        for selector in ("article h3", ".sign.yes", "article .pairs dt", "article .pairs a"):
            assert contrast(browser.execute_script(style, selector, "color"), page) > 4.5, selector
        assert (
            contrast(browser.execute_script(style, ".sign.no", "color"), page) > 3
        )  # a sign beside its words
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []


def column(browser, index):
    script = """return [...document.querySelectorAll('table.sortable tbody tr')]
        .map(row => row.cells[arguments[0]].dataset.value)"""
    return browser.execute_script(script, index)


def sorts(browser):
    script = """return [...document.querySelectorAll('table.sortable th[aria-sort]')]
        .map(th => [th.textContent, th.getAttribute('aria-sort')])"""
    return browser.execute_script(script)


def test_sorting_by_mouse(browser, pages):
    view(browser, pages["images"], 1280)
    assert sorts(browser) == []
    button = browser.find_element("css selector", 'th button[data-name="Clean: NLL"]')
    index = int(button.get_attribute("data-column"))
    before = column(browser, index)
    assert before.count("") == 1
    button.click()
    first = column(browser, index)
    assert first == [*sorted((v for v in before if v), key=float), ""]
    assert sorts(browser) == [["NLL", "ascending"]]
    button.click()
    assert column(browser, index) == [*sorted((v for v in before if v), key=float, reverse=True), ""]
    assert sorts(browser) == [["NLL", "descending"]]
    browser.find_element("css selector", 'th button[data-name="method"]').click()
    assert sorts(browser) == [["Method", "ascending"]]
    assert column(browser, 0)[-3:] == ["Deep ensemble", "Deterministic", "Rank-1 BNN"]


def test_sorting_by_keyboard(browser, pages):
    from selenium.webdriver.common.keys import Keys

    view(browser, pages["cubic"], 1280)
    button = browser.find_element("css selector", 'th button[data-name="Shifted: NLL"]')
    index = int(button.get_attribute("data-column"))
    previous = browser.find_element("css selector", f'th button[data-column="{index - 1}"]')
    browser.execute_script("arguments[0].focus()", previous)
    previous.send_keys(Keys.TAB)
    assert browser.switch_to.active_element == button
    button.send_keys(Keys.ENTER)
    values = [float(v) for v in column(browser, index)]
    assert values == sorted(values)
    button.send_keys(Keys.SPACE)
    values = [float(v) for v in column(browser, index)]
    assert values == sorted(values, reverse=True)
    assert "descending" in browser.find_element("id", "announce").get_attribute("textContent")


def test_png_is_made_in_the_page(browser, pages):
    view(browser, pages["images"], 1280)
    browser.get_log("browser")
    browser.find_element("css selector", 'button[data-png="severity"]').click()
    from selenium.webdriver.support.ui import WebDriverWait

    target = browser.downloads / "severity.png"
    WebDriverWait(browser, 30).until(lambda _: target.exists() and target.stat().st_size > 10_000)
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert browser.get_log("browser") == []


def test_print_is_light_and_without_buttons(browser, pages, tmp_path):
    view(browser, pages["images"], 690, scheme="dark", media="print")
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    assert browser.execute_script(style, "nav", "display") == "none"
    assert browser.execute_script(style, ".tools", "display") == "none"
    assert browser.execute_script(style, "body", "backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script("return document.documentElement.scrollWidth") == 690
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    (tmp_path / "report.pdf").write_bytes(base64.b64decode(pdf["data"]))
    assert base64.b64decode(pdf["data"]).startswith(b"%PDF")


def contrast(a, b):
    """WCAG's contrast ratio of two rgb() colours."""

    def luminance(colour):
        channels = [int(v) / 255 for v in colour[4:-1].split(",")]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(browser, pages, scheme):
    view(browser, pages["images"], 1280, scheme=scheme)
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    card = browser.execute_script(style, "figure", "backgroundColor")
    for selector in ("figure h3", "figcaption", ".tools a", ".summary thead button", ".summary .best"):
        assert contrast(browser.execute_script(style, selector, "color"), card) > 4.5, selector
    ink = browser.execute_script(style, ".panels svg text", "fill")
    assert contrast(ink, card) > 4.5
