"""Holds the report's pages against a real browser: chromium, headless, driven by selenium.

    FORWARD_BENCH_REPORT=DIR cargo test --test report
    python3 tests/browser/check.py DIR [--screenshots DIR]

For every page below DIR/forward: no message on the console, every link resolves, nothing is wider than a screen of 400 px,
every picture has a text alternative, a dark page is dark, and tables sort by mouse and by keyboard.
"""

import argparse
import pathlib
import re
import sys
import urllib.parse

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

FAILURES = []

# The case of the fixture that has most to show.
FULLEST = "64x1@8192"


def check(fine, page, what):
    if not fine:
        FAILURES.append(f"{page}: {what}")


def browser():
    options = webdriver.ChromeOptions()
    for flag in ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path="/usr/bin/chromedriver")
    return webdriver.Chrome(options=options, service=service)


def show(driver, page, width=1280, height=900, dark=False):
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.get(page.as_uri())


def console(driver, page):
    for entry in driver.get_log("browser"):
        check(False, page, f"console: {entry['message']}")
    for entry in driver.get_log("performance"):
        found = re.search(r'"method":"Network.requestWillBeSent".*?"url":"(\w+):', entry["message"])
        check(not found or found[1] in ("file", "data"), page, f"asks the network: {entry['message'][:200]}")


def links(driver, page, pages):
    """Every link leads to a file that is there, and to a place in it."""
    targets = set()
    for kind in ["href", "src"]:
        for value in driver.execute_script(
            f"return [...document.querySelectorAll('[{kind}]')].map((e) => e.getAttribute('{kind}'))"
        ):
            url = urllib.parse.urlsplit(urllib.parse.urljoin(page.as_uri(), value))
            if url.scheme == "data":
                continue
            check(url.scheme == "file", page, f"leads away: {value}")
            file = pathlib.Path(urllib.parse.unquote(url.path))
            check(file.is_file(), page, f"leads nowhere: {value}")
            if url.fragment and file == page:
                check(driver.find_elements(By.ID, url.fragment), page, f"no such place: {value}")
            targets.add(file)
    return targets


def pictures(driver, page):
    count = driver.execute_script("return document.querySelectorAll('svg').length")
    told = driver.execute_script(
        "return [...document.querySelectorAll('svg')]"
        ".filter((e) => (e.closest('[role=img]')?.getAttribute('aria-label') ?? '').length > 20).length"
    )
    check(count == told, page, f"{count - told} pictures have no text alternative")
    empty = driver.execute_script(
        "return [...document.querySelectorAll('svg')].filter((e) => e.getBoundingClientRect().height < 50).length"
    )
    check(empty == 0, page, f"{empty} pictures are not to be seen")
    return count


def names(driver, page):
    """What assistive programs rely on."""
    check(driver.execute_script("return document.documentElement.lang") == "en", page, "no language")
    check(driver.execute_script("return document.querySelectorAll('h1').length") == 1, page, "not one h1")
    for what, selector in [
        ("a header without a scope", "th:not([scope])"),
        ("a table without a caption", "table:not(:has(caption))"),
        ("a box without a name", "[role=region]:not([aria-label])"),
    ]:
        check(not driver.find_elements(By.CSS_SELECTOR, selector), page, what)
    twice = driver.execute_script(
        "const ids = [...document.querySelectorAll('[id]')].map((e) => e.id); return ids.length - new Set(ids).size"
    )
    check(twice == 0, page, "an id is there twice")
    driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    first = driver.switch_to.active_element
    check("skip" in (first.get_attribute("class") or ""), page, "the first stop is not the skip link")
    check(first.rect["x"] >= 0, page, "the skip link is not to be seen when it has the focus")


def narrow(driver, page):
    show(driver, page, width=400)
    width = driver.execute_script("return document.documentElement.scrollWidth")
    check(width <= 400, page, f"{width} px wide on a screen of 400")


def luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(driver, page, dark):
    """Text against its page by WCAG 2.2, 1.4.3; also that of pictures."""
    colours = """
        const box = document.querySelector(arguments[0]);
        return box && [getComputedStyle(box)[arguments[1]], getComputedStyle(box.closest('.picture') ?? document.body).backgroundColor]
    """
    for selector, kind in [("body", "color"), (".quiet", "color"), ("a", "color"), ("svg text", "fill"), (".state", "color")]:
        found = driver.execute_script(colours, selector, kind)
        if found:
            text, ground = sorted(map(luminance, found), reverse=True)
            check((text + 0.05) / (ground + 0.05) >= 4.5, page, f"{selector}: too little contrast, {found}, dark: {dark}")


def dark(driver, page):
    contrast(driver, page, False)
    show(driver, page, dark=True)
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    check(luminance(ground) < 0.05, page, f"not dark: {ground}")
    contrast(driver, page, True)


def column(driver, table, at):
    return driver.execute_script(
        "return [...arguments[0].tBodies[0].rows].map((row) => row.cells[arguments[1]].dataset.value ?? row.cells[arguments[1]].textContent.trim())",
        table,
        at,
    )


def is_sorted(values, numbers, down):
    there = [float(value) if numbers else value.lower() for value in values if value != ""]
    missing_last = all(value != "" for value in values[: len(there)])
    return missing_last and (not numbers or there == sorted(there, reverse=down))


def sorting(driver, page, columns):
    """By mouse upwards, by Enter downwards, by Space upwards again; the first so many columns of each table."""
    for table in driver.find_elements(By.CSS_SELECTOR, "table.sortable"):
        if not table.is_displayed():
            continue
        for at, header in enumerate(table.find_elements(By.CSS_SELECTOR, "thead th")[:columns]):
            numbers = "n" in (header.get_attribute("class") or "").split()
            before = column(driver, table, at)
            button = header.find_element(By.TAG_NAME, "button")
            presses = [
                ("ascending", lambda: driver.execute_script("arguments[0].click()", button)),
                ("descending", lambda: button.send_keys(Keys.ENTER)),
                ("ascending", lambda: button.send_keys(Keys.SPACE)),
            ]
            for order, press in presses:
                press()
                values = column(driver, table, at)
                where = f"column {header.text!r}"
                check(header.get_attribute("aria-sort") == order, page, f"{where} is not {order}")
                check(is_sorted(values, numbers, order == "descending"), page, f"{where} is not sorted: {values[:9]}")
                check(sorted(values) == sorted(before), page, f"{where} lost a row")
            marked = table.find_elements(By.CSS_SELECTOR, "[aria-sort]")
            check(len(marked) == 1, page, "more than one column says that it is sorted by")


def known_order(driver, index):
    """The first table once more, against what the fixture's numbers are: 9 is less than 10."""
    show(driver, index)
    table = driver.find_element(By.CSS_SELECTOR, "table.sortable")
    button = table.find_elements(By.CSS_SELECTOR, "thead button")[1]
    button.click()
    times = [float(cell.text) for cell in table.find_elements(By.CSS_SELECTOR, "tbody tr td:nth-child(2)")]
    check(times == sorted(times) and len(times) >= 2, index, f"times are not in order: {times}")


def shots(driver, pages, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for at, page in enumerate(pages):
        for name, width, is_dark in [("wide", 1280, False), ("dark", 1280, True), ("narrow", 400, False), ("narrow-dark", 400, True)]:
            show(driver, page, width=width, dark=is_dark)
            height = driver.execute_script("return document.documentElement.scrollHeight")
            show(driver, page, width=width, height=min(height, 8000), dark=is_dark)
            driver.save_screenshot(str(folder / f"{at}-{name}.png"))
        print(f"{at}: {page}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=pathlib.Path)
    parser.add_argument("--screenshots", type=pathlib.Path)
    arguments = parser.parse_args()
    home = arguments.home.resolve() / "forward"
    pages = sorted(home.rglob("*.html"), key=lambda page: (len(page.parts), page))
    index = home / "index.html"
    assert index in pages, f"{index} is not there"
    driver = browser()
    try:
        reached, count = set(), 0
        for page in pages:
            show(driver, page)
            reached |= links(driver, page, pages)
            count += pictures(driver, page)
            names(driver, page)
            sorting(driver, page, 99 if page == index or page.stem == FULLEST else 2)
            dark(driver, page)
            narrow(driver, page)
            console(driver, page)
        for page in pages:
            check(page in reached, page, "no link leads here")
        known_order(driver, index)
        if arguments.screenshots:
            shots(driver, pages, arguments.screenshots)
    finally:
        driver.quit()
    for failure in FAILURES:
        print(f"error: {failure}", file=sys.stderr)
    print(f"{len(pages)} pages, {count} pictures, {len(FAILURES)} failures")
    sys.exit(bool(FAILURES))


if __name__ == "__main__":
    main()
