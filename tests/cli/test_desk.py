"""What the app's screens are given: this computer, offers, plans, packs, jobs and what is kept."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moet_desk.catalogue import find_entry
from moet_desk.cli.app import Start, plan_start
from moet_desk.cli.context import Invocation
from moet_desk.cli.desk import APP_FILE, AppDesk
from moet_desk.cli.desk_jobs import steps_of
from moet_desk.cli.desk_machine import _LINE_OF_CHECK, doctor_view, machine_view, show_folder
from moet_desk.cli.desk_plans import (
    USABLE_TOK_PER_S,
    catalogue_offer,
    context_choices,
    fit_of,
    keep_free_choices,
    options_for,
    plan_view,
    ranked,
)
from moet_desk.cli.desk_sources import Known, pull_arguments, repository_in
from moet_desk.doctor import CHECKS, examine
from moet_desk.engine.handle import EngineOptions, Quality
from moet_desk.engine.planned_model import from_catalogue
from moet_desk.engine.planning import ModelPlan, plan_model
from moet_desk.errors import MoetError
from moet_desk.machine import MachineFacts, Rates, from_json
from moet_desk.probing.rates import read_rates, save_rates
from moet_desk.settings import Settings
from moet_desk.store.library import embedded_source
from moet_desk.store.state_file import read_record, write_record
from moet_desk.ui.desk import Fit, JobState, JobStep, Mark, Offer, PackCondition, PlanWishes
from moet_desk.ui.setup_steps import Setup, Step, to_kept
from moet_desk.units import GIB
from tests.cli.conftest import Command, environment
from tests.store.kimi import write_kimi

MACHINES = Path(__file__).resolve().parents[1] / "data" / "machines"
OPTIONS = EngineOptions(device="auto", prefix_bytes=None)


def recorded(name: str) -> MachineFacts:
    return from_json((MACHINES / f"{name}.json").read_bytes())


def model(name: str) -> Any:
    entry = find_entry(name)
    assert entry is not None
    return from_catalogue(entry)


@pytest.fixture
def desk(data_dir: Path) -> AppDesk:
    invocation = Invocation()
    invocation.data_dir = data_dir

    def open_pack(name: str, wishes: PlanWishes | None) -> Any:
        return ("opened", name, wishes)

    return AppDesk(invocation, Settings(), open_pack)


# -- this computer -----------------------------------------------------------------------------


def test_checks__every_one__has_words_and_a_known_line() -> None:
    assert all(check.passed for check in CHECKS.values())
    assert set(_LINE_OF_CHECK) <= set(CHECKS)


def test_machine_view__recorded_computer__marks_of_its_findings() -> None:
    facts = recorded("cpu-only")
    view = machine_view(facts, examine(facts), models_dir="/m", free_bytes=5)
    gpu = next(fact for fact in view.facts if fact.name == "GPU")
    assert gpu.mark is Mark.WARN
    assert gpu.detail == "No graphics card that can be used"
    assert next(fact for fact in view.facts if fact.name == "CPU").mark is Mark.OK


def test_doctor_view__all_checks__worst_first() -> None:
    facts = recorded("cpu-only")
    found = examine(facts)
    view = doctor_view(found, {"schema": 1})
    passed = [row for row in view.findings if row.mark is Mark.OK]
    assert [row.code for row in view.findings[: len(found.findings)]] == [
        row.check for row in found.findings
    ]
    assert len(passed) == len(found.passed)


def test_doctor__same_document_as_the_command(desk: AppDesk, moet: Command) -> None:
    shown, printed = desk.doctor().document, moet("doctor", "--json").document
    assert shown["findings"] == printed["findings"]
    assert shown.keys() == printed.keys()
    path = desk.save_report(desk.doctor())
    assert read_record(path)["findings"] == printed["findings"]


@pytest.mark.slow
def test_measure__in_a_child__rates_are_kept_and_compared(
    desk: AppDesk, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(data_dir).items():
        monkeypatch.setenv(name, value)
    save_rates(data_dir, Rates(measured="2020-01-01T00:00:00Z", ram_copy=2e9))
    said: list[str] = []
    view = desk.measure(said.append)
    assert said == ["RAM", "the drive"]
    row = next(row for row in view.findings if row.title == "The computer was measured")
    assert "(was 2.0 GB/s)" in row.cause
    assert "before on 2020-01-01" in row.cause
    kept = read_rates(data_dir)
    assert kept is not None
    assert kept.measured > "2026"


@pytest.mark.slow
def test_measure__folder_cannot_be_written__the_child_s_error(
    desk: AppDesk, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(data_dir).items():
        monkeypatch.setenv(name, value)
    data_dir.write_text("a file in its place")
    with pytest.raises(MoetError, match="MD-DISK-03"):
        desk.measure(lambda what: None)


def test_put_in_order__what_was_done(desk: AppDesk, data_dir: Path) -> None:
    assert f"made the folder {data_dir}" in desk.put_in_order()
    assert desk.put_in_order() == ()


# -- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["5090-96gb", "cpu-only", "3090-32gb", "5090-192gb"])
def test_plan_view__bars_add_up_to_the_memory(machine: str) -> None:
    facts = recorded(machine)
    view = plan_view(facts, model("qwen3-30b-a3b"), OPTIONS, PlanWishes())
    assert view.rows
    for row in view.rows:
        assert sum(part.n_bytes for part in row.parts) == row.total_bytes
    assert view.context in view.contexts
    assert view.keep_free in view.keep_frees


def test_plan_view__document_is_the_command_s(
    moet: Command, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOET_DESK_ENGINE_DEVICE")
    printed = moet("plan", "deepseek-v3.1", "--machine", str(MACHINES / "5090-96gb.json"), "--json")
    view = plan_view(recorded("5090-96gb"), model("deepseek-v3.1"), OPTIONS, PlanWishes())
    assert dict(view.document) == printed.document


def test_plan_view__more_kept_free__fewer_experts_on_the_card() -> None:
    facts, big = recorded("5090-96gb"), model("deepseek-v3.1")

    def on_card(keep_free: int) -> int:
        view = plan_view(facts, big, OPTIONS, PlanWishes(keep_free=keep_free))
        assert view.keep_free == keep_free
        experts = [part for part in view.rows[0].parts if part.label == "2-bit experts"]
        return experts[0].n_bytes

    assert on_card(8 * GIB) < on_card(2 * GIB)


def test_plan_view__nothing_fits__says_why_and_keeps_the_choices() -> None:
    view = plan_view(recorded("laptop-8gb"), model("kimi-k2.5"), OPTIONS, PlanWishes())
    assert view.problem is not None
    assert view.contexts
    assert view.keep_frees


def test_plan_view__ram_beside_a_card__can_be_wished_for() -> None:
    facts, big = recorded("5090-96gb"), model("deepseek-v3.1")
    view = plan_view(facts, big, OPTIONS, PlanWishes())
    assert view.ram in view.rams
    less = plan_view(facts, big, OPTIONS, PlanWishes(ram=16 * GIB))
    assert less.ram == 16 * GIB
    (arena,) = [part for part in less.rows[1].parts if part.label == "packed experts"]
    assert arena.n_bytes <= 16 * GIB
    on_cpu = plan_view(recorded("cpu-only"), model("qwen3-30b-a3b"), OPTIONS, PlanWishes(ram=GIB))
    assert on_cpu.rams == ()


def test_pack_offer__installed__planned_with_what_is_kept(desk: AppDesk, moet: Command) -> None:
    with pytest.raises(MoetError, match="MD-LIB-01"):
        desk.pack_offer("demo")
    assert moet("pack", "demo", "-q").code == 0
    offer, wishes = desk.pack_offer("demo")
    assert wishes == PlanWishes()
    view = desk.plan(offer, PlanWishes(context=1024))
    assert view is not None
    assert (view.problem, view.context) == (None, 1024)
    changed = PlanWishes(2048, 3 * GIB, "exact", 5 * GIB)
    desk.opener("other", PlanWishes(1))()
    desk.save_wishes("demo", changed)
    assert desk.pack_offer("demo")[1] == changed
    assert desk.opener("demo")() == ("opened", "demo", changed)
    assert desk.wishes_for("other") == PlanWishes(1)
    path, is_shown = desk.show_folder("demo")
    assert (path.name, is_shown) == ("demo", False)


def test_options_for__wishes__on_the_card_or_in_ram() -> None:
    facts = recorded("5090-96gb")
    wishes = PlanWishes(4096, 4 * GIB, "exact")
    card = options_for(facts, OPTIONS, wishes)
    assert card.vram_bytes == facts.gpus[0].vram_free - 4 * GIB
    assert (card.context, card.quality, card.ram_bytes) == (4096, Quality.EXACT, None)
    cpu = options_for(facts, EngineOptions(device="cpu"), wishes)
    assert cpu.ram_bytes == facts.memory.available - 4 * GIB
    kept = options_for(facts, replace(OPTIONS, context=1024), PlanWishes())
    assert (kept.context, kept.vram_bytes) == (1024, None)


def test_choices__rise_and_hold_the_value_in_use() -> None:
    assert context_choices(4096) == (1024, 2048, 4096)
    assert context_choices(3000) == (1024, 2048, 3000)
    assert 7 in keep_free_choices(GIB, 7)
    assert max(keep_free_choices(3 * GIB, 0)) == 2 * GIB


@pytest.mark.parametrize(("name", "fit"), [("deepseek-v4-flash", Fit.GOOD), ("glm-5.2", Fit.SLOW)])
def test_offers__a_forecast_around_the_speed_of_reading__counts_by_its_slow_end(
    name: str, fit: Fit
) -> None:
    answer = plan_model(recorded("5090-128gb"), model(name), OPTIONS)
    assert isinstance(answer, ModelPlan)
    low, high = answer.forecast.tok_per_s
    assert high > USABLE_TOK_PER_S
    assert (low > USABLE_TOK_PER_S) is (fit is Fit.GOOD)
    assert fit_of(answer) is fit


def test_offers__ranked__largest_good_one_is_best() -> None:
    facts = recorded("5090-96gb")
    entry = find_entry("deepseek-v3.1")
    assert entry is not None
    good = catalogue_offer(entry, plan_model(facts, from_catalogue(entry), OPTIONS), ready=False)
    assert good.fit in (Fit.GOOD, Fit.SLOW)
    assert good.forecast.endswith("t/s")
    offers = [Offer("a", "a", fit=fit) for fit in (Fit.NO_ROOM, Fit.SLOW, Fit.GOOD)]
    found = ranked([*((offer, 1.0) for offer in offers), (Offer("b", "b", fit=Fit.GOOD), 9.0)])
    assert [(o.id, o.fit) for o in found][:2] == [("b", Fit.BEST), ("a", Fit.GOOD)]
    assert found[-1].fit is Fit.NO_ROOM


def test_catalogue_offer__no_room__says_the_figures() -> None:
    entry = find_entry("deepseek-v3.1")
    assert entry is not None
    answer = plan_model(recorded("laptop-8gb"), from_catalogue(entry), OPTIONS)
    offer = catalogue_offer(entry, answer, ready=False)
    assert offer.fit is Fit.NO_ROOM
    assert "GB" in offer.reason
    assert (offer.total, offer.active, offer.licence) == ("671B", "37B", "MIT")


# -- models ------------------------------------------------------------------------------------


def test_demo__offered_and_planned_before_it_is_packed(desk: AppDesk) -> None:
    demo = next(offer for offer in desk.offers() if offer.id == "demo")
    assert demo.download_bytes == 0
    assert not demo.ready
    view = desk.plan(demo, PlanWishes(context=1024))
    assert view is not None
    assert view.problem is None
    assert view.context == 1024


def test_look_up__folder_link_and_nothing(desk: AppDesk, tmp_path: Path) -> None:
    offer = desk.look_up(str(embedded_source()))
    assert offer.title == "demo"
    assert offer.download_bytes == 0
    assert "9 MoE layers x 32 experts" in offer.about[0]
    assert desk.name_of(offer) == "demo"
    assert len(offer.about) == 1
    write_kimi(tmp_path / "kimi")
    kimi = desk.look_up(str(tmp_path / "kimi"))
    assert kimi.about[1] == "Left out, tensors that begin with: vision_tower (2), mm_projector (1)."
    with pytest.raises(MoetError, match="MD-SRC-01"):
        desk.look_up("no such thing at all")
    with pytest.raises(MoetError, match="MD-SRC-01"):
        desk.look_up(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "repo"),
    [
        ("a/b", "a/b"),
        (" https://huggingface.co/a/b ", "a/b"),
        ("huggingface.co/a/b/tree/main?x=1", "a/b"),
        ("https://example.org/a/b", "https://example.org/a/b"),
    ],
)
def test_repository_in(text: str, repo: str) -> None:
    assert repository_in(text) == repo


def test_library__packed_and_begun__conditions_and_details(
    desk: AppDesk, moet: Command, data_dir: Path
) -> None:
    assert desk.library().packs == ()
    assert moet("pack", "demo", "-q").code == 0
    begun = data_dir / "models" / "begun"
    begun.mkdir()
    (begun / "experts.base").write_bytes(b"")
    packs = {pack.name: pack for pack in desk.library().packs}
    assert packs["demo"].condition is PackCondition.READY
    assert packs["demo"].family == "deepseek_v3"
    assert "32 experts" in packs["demo"].details[0]
    assert packs["begun"].condition is PackCondition.INCOMPLETE
    assert next(offer for offer in desk.offers() if offer.id == "demo").ready


# -- jobs --------------------------------------------------------------------------------------


def test_job__start_to_end__seen_and_forgotten(desk: AppDesk) -> None:
    demo = next(offer for offer in desk.offers() if offer.id == "demo")
    job_id = desk.start(demo, PlanWishes())
    assert desk.start(demo, PlanWishes()) == job_id  # taken up, not begun twice
    until(lambda: desk.jobs()[0].state is JobState.DONE)
    view = desk.jobs()[0]
    assert (view.kind, view.model, view.error) == ("pack", "demo", None)
    assert all(step.finished for step in view.steps)
    desk.save_setup(to_kept(Setup(Step.GET, offer="demo", job=job_id, model="demo")))
    desk.forget_done()
    time.sleep(0.1)
    assert desk.jobs()
    desk.save_setup({})
    desk.forget_done()
    until(lambda: not desk.jobs())


def test_job__paused_and_resumed__goes_on(desk: AppDesk) -> None:
    demo = next(offer for offer in desk.offers() if offer.id == "demo")
    job_id = desk.start(demo, PlanWishes())
    until(lambda: any(step.total for step in desk.jobs()[0].steps))
    desk.pause(job_id)
    until(lambda: desk.jobs()[0].state is JobState.PAUSED)
    assert desk.jobs()[0].error is None
    desk.resume(job_id)
    until(lambda: desk.jobs()[0].state is JobState.DONE)


def test_job__that_does_not_run__trouble_is_shown_with_it(desk: AppDesk) -> None:
    job_id = desk.verify("nothing")
    until(lambda: desk.jobs()[0].state is JobState.FAILED)
    error = desk.jobs()[0].error
    assert error is not None
    assert error.code == "MD-LIB-01"
    desk.pause(job_id)
    until(lambda: desk.jobs()[0].error.code == "MD-JOB-02")  # type: ignore[union-attr]


def until(reached: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_start_and_repair__the_commands_of_the_jobs(
    desk: AppDesk, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, str, list[str]]] = []

    def start(kind: str, model: str, arguments: list[str]) -> str:
        started.append((kind, model, arguments))
        return "id"

    monkeypatch.setattr(desk._jobs, "start", start)
    offer = Offer("a/b", "b")
    arguments = pull_arguments("a/b", "b", reclaim=True)
    desk._known["a/b"] = Known(offer, "b", None, "pull", arguments)
    first = ["--data-dir", str(data_dir)]
    assert desk.start(offer, PlanWishes(), 10**6) == "id"
    desk.start(offer, PlanWishes())
    demo = next(offer for offer in desk.offers() if offer.id == "demo")
    desk.start(demo, PlanWishes(), 10**6)
    desk.repair("b")
    assert started[0] == ("pull", "b", [*first, *arguments, "--limit-rate", "1000000"])
    assert started[1] == ("pull", "b", [*first, *arguments])
    assert "--limit-rate" not in started[2][2]  # nothing is fetched
    assert started[3] == ("repair", "b", [*first, "verify", "b", "--repair"])


def test_steps_of__a_repair__fetching_when_there_is_something() -> None:
    latest = {
        "verify": {"done": 16, "total": 16, "unit": "rows", "bytes": 0},
        "fetch": {"done": 3, "total": 9, "unit": "bytes", "rate_bytes_per_s": 1.0},
    }
    verify, fetch, repair = steps_of("repair", latest, is_done=False)
    assert verify.finished
    assert (fetch.name, fetch.done, fetch.total) == ("Fetch", 3, 9)
    assert not repair.total


def test_show_folder__with_a_desktop__it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = tmp_path / "bin" / "xdg-open"
    opener.parent.mkdir()
    opener.write_text(f'#!/bin/sh\nprintf %s "$1" > {tmp_path}/shown\n')
    opener.chmod(0o755)
    monkeypatch.setenv("PATH", str(opener.parent))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not show_folder(tmp_path)
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert show_folder(tmp_path)
    until(lambda: (tmp_path / "shown").is_file() and (tmp_path / "shown").read_text())
    assert (tmp_path / "shown").read_text() == str(tmp_path)
    opener.unlink()
    assert not show_folder(tmp_path)


def test_steps_of__a_pull__download_and_packing_beside_each_other() -> None:
    latest = {
        "download": {"done_bytes": 5, "total_bytes": 10, "rate_bytes_per_s": 2.0, "files": 3,
                     "files_done": 1},
        "pack": {"done": 10, "total": 40, "unit": "rows", "bytes": 100, "rate_bytes_per_s": 50},
    }  # fmt: skip
    download, dense, pack = steps_of("pull", latest, is_done=False)
    assert download == JobStep("Download", 5, 10, rate=2.0, note="1 of 3 files")
    assert dense.finished
    assert pack == JobStep("Pack", 10, 40, "experts", rate=5.0)
    assert all(step.finished for step in steps_of("pull", {}, is_done=True))
    waiting = steps_of("pull", {}, is_done=False)
    assert waiting[2].note == "begins when files are there"
    trouble = {"download": {"done_bytes": 0, "total_bytes": 9, "trouble": "no network, 2 of 8"}}
    assert steps_of("pull", trouble, is_done=False)[0].note == "no network, 2 of 8"


# -- what is kept, and how the app begins ------------------------------------------------------


def test_opener__remembers_the_model_and_its_wishes(desk: AppDesk, moet: Command) -> None:
    assert desk.last_model() is None
    wishes = PlanWishes(1024, 5, "exact")
    assert desk.opener("demo", wishes)() == ("opened", "demo", wishes)
    assert desk.last_model() is None  # it is not on this computer
    assert moet("pack", "demo", "-q").code == 0
    assert desk.last_model() == "demo"
    assert desk.opener("demo")() == ("opened", "demo", wishes)
    assert desk.opener("other")() == ("opened", "other", None)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"model": 3, "wishes": []}'])
def test_records__damaged_file__counts_as_empty(
    desk: AppDesk, data_dir: Path, content: bytes
) -> None:
    data_dir.mkdir()
    (data_dir / APP_FILE).write_bytes(content)
    assert desk.last_model() is None
    assert desk.wishes_for("demo") is None


def test_write_record__full_folder__old_record_stays(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.json"
    write_record(path, {"a": 1})
    write_record(path, {"a": 2})
    assert read_record(path) == {"a": 2}
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]
    path.unlink()
    path.mkdir()
    with pytest.raises(MoetError, match="MD-DISK-03"):
        write_record(path, {"a": 3})


def test_plan_start__first_run_last_model_and_open_wizard(desk: AppDesk, moet: Command) -> None:
    library = desk._library

    def start() -> Start:
        return plan_start(desk, library, quality="exact")

    assert start() == Start(setup=Setup(wishes=PlanWishes(quality="exact")))
    left = Setup(Step.PLAN, offer="demo", open=False)
    desk.save_setup(to_kept(left))
    assert start() == Start(setup=left)  # there is no model: it goes on in any case
    assert moet("pack", "demo", "-q").code == 0
    assert start() == Start("demo")
    desk.save_setup(to_kept(replace(left, open=True)))
    desk.opener("demo", PlanWishes())()
    assert start() == Start("demo", setup=replace(left, open=True))
    starting = Setup(Step.START, offer="demo", model="demo", open=True)
    desk.save_setup(to_kept(starting))
    assert start() == Start(setup=starting)


def test_plan_start__demo_of_another_version__is_packed_first(
    desk: AppDesk, moet: Command, data_dir: Path
) -> None:
    assert moet("pack", "demo", "-q").code == 0
    record = data_dir / "models" / "demo" / "pack.json"
    write_record(record, read_record(record) | {"format": 99})
    assert plan_start(desk, desk._library, quality="fast") == Start("demo", packs_first=True)
