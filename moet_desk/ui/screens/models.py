"""The Models screen: packs on this computer, jobs, and models that can be added.

One list, so that one cursor reaches everything; keys act on the row under it. What is on disk is
read again every two seconds in a thread while the screen is in front. UI thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from moet_desk.errors import MoetError
from moet_desk.telemetry import EngineSnapshot
from moet_desk.ui.background import Background
from moet_desk.ui.clock import Clock
from moet_desk.ui.desk import (
    Desk,
    Fit,
    JobState,
    JobView,
    LibraryView,
    Offer,
    PackCondition,
    PackView,
    PlanWishes,
)
from moet_desk.ui.screens.pack_plan import PackPlan
from moet_desk.ui.text import clean_line
from moet_desk.ui.theme import Glyphs
from moet_desk.ui.widgets.filter_line import FilterLine, matches
from moet_desk.ui.widgets.frame import SmallWindow, TabLine
from moet_desk.ui.widgets.gauges import StatusLine, spread
from moet_desk.ui.widgets.job_lines import job_line
from moet_desk.ui.widgets.key_line import KeyLine
from moet_desk.ui.widgets.model_rows import (
    PACK_HEAD,
    delete_question,
    job_notes,
    pack_notes,
    pack_row,
)
from moet_desk.ui.widgets.problem import ConfirmDialog, problem_content
from moet_desk.ui.widgets.setup_pages import OFFER_HEAD, offer_notes, offer_row, pointed, rows
from moet_desk.ui.widgets.sign_in import SignInDialog, may_sign_in
from moet_desk.units import show_disk

REFRESH_S = 2.0

Row = PackView | JobView | Offer


class ModelList(OptionList):
    """The rows; Enter acts on the one under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select", "Load", id="models.load"),
        Binding("j", "cursor_down", "Down", id="models.down", show=False),
        Binding("k", "cursor_up", "Up", id="models.up", show=False),
    ]


class ModelsScreen(Screen[None]):
    """See the module's paragraph. `show` is called by the app's gauge timer."""

    DEFAULT_CSS = """
    ModelsScreen #place { height: 2; }
    ModelsScreen #shelf { height: 1fr; }
    ModelsScreen ModelList, ModelsScreen ModelList:focus { height: auto; border: none; padding: 0; }
    ModelsScreen #notes { height: auto; padding: 1 0 0 0; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "add", "Add", id="models.add"),
        Binding("v", "verify", "Verify", id="models.verify"),
        Binding("d,delete,x", "delete", "Delete", id="models.delete"),
        Binding("p", "pause", "Pause", id="models.pause"),
        Binding("c", "plan", "Plan", id="models.plan", show=False),
        Binding("r", "repair", "Repair", id="models.repair", show=False),
        Binding("o", "folder", "Folder", id="models.folder", show=False),
        Binding("slash", "filter", "Filter", id="models.filter", show=False),
        Binding("s", "sign_in", "Sign in", id="models.sign_in", show=False),
        Binding("escape", "app.go('chat')", "Chat", id="models.back", show=False),
    ]

    class Load(Message):
        """A pack is to be loaded, or chatted with if it is; with `wishes` it is loaded again."""

        def __init__(self, name: str, wishes: PlanWishes | None = None) -> None:
            super().__init__()
            self.name = name
            self.wishes = wishes

    class Add(Message):
        """The wizard is wanted, for this offer if one is given."""

        def __init__(self, offer: Offer | None) -> None:
            super().__init__()
            self.offer = offer

    def __init__(self, desk: Desk, glyphs: Glyphs, *, clock: Clock, plain: bool) -> None:
        super().__init__()
        self._desk = desk
        self._glyphs = glyphs
        self._clock = clock
        self._plain = plain
        self._reading: Background[LibraryView] | None = None
        self._offering: Background[tuple[Offer, ...]] | None = None
        self._removing: Background[int] | None = None
        self._library: LibraryView | None = None
        self._problem: MoetError | None = None
        self._jobs: tuple[JobView, ...] = ()
        self._loaded = ""
        self._due_s = 0.0
        self._rows: dict[str, Row] = {}
        self._drawn_once = False

    def compose(self) -> ComposeResult:
        yield TabLine("models", plain=self._plain)
        with VerticalScroll(id="shelf", can_focus=False):
            yield Static("", id="place", markup=False)
            yield ModelList()
            yield FilterLine(self._refilter, lambda: self.query_one(ModelList).focus())
            yield Static("", id="notes", markup=False)
        yield StatusLine(self._glyphs)
        yield KeyLine()
        yield SmallWindow(self._glyphs)

    def on_mount(self) -> None:
        self._drawn_once = True
        self.query_one(ModelList).focus()

    def on_screen_resume(self) -> None:
        self._due_s = 0.0

    @property
    def searching(self) -> bool:
        """Whether the first look at folder and catalogue still goes on."""
        offering = self._offering
        return self._library is None or offering is None or not offering.ended

    # -- what is shown ---------------------------------------------------------------------------

    def show(
        self, snapshot: EngineSnapshot, *, context_used: int, notes: tuple[str, ...],
        jobs: Sequence[JobView], loaded: str,
    ) -> None:  # fmt: skip
        """Draw what is known; called four times a second while in front."""
        if not self._drawn_once:
            return
        self.query_one(StatusLine).show(snapshot, context_used=context_used, notes=notes)
        self._jobs, self._loaded = tuple(jobs), loaded
        self._take()
        self._draw()

    def _take(self) -> None:
        """Take what the threads have brought, and begin the next reading when it is due."""
        reading, now_s = self._reading, self._clock.monotonic()
        if reading is not None and reading.ended:
            self._library = reading.result or self._library
            self._problem, self._reading = reading.error, None
        if self._reading is None and now_s >= self._due_s:
            self._due_s = now_s + REFRESH_S
            self._reading = Background(self._desk.library, name="library")
        if self._offering is None:
            self._offering = Background(self._desk.offers, name="offers")
        removing = self._removing
        if removing is not None and removing.ended:
            self._removing, self._due_s = None, 0.0
            if removing.error is not None:
                self._say(removing.error)
            else:
                self.notify(f"{show_disk(removing.result or 0)} are free again.")

    def _draw(self) -> None:
        width = self.size.width
        self._set("place", self._place(width))
        self._fill(width)
        self._draw_notes(width)

    def _place(self, width: int) -> Content:
        library = self._library
        left = Content.styled(" On this computer", "bold")
        if library is None:
            return left
        words = f"used {show_disk(library.used_bytes)}, {show_disk(library.free_bytes)} free "
        return spread(left, Content.styled(words, "$dim"), width)

    def _set(self, name: str, content: Content) -> None:
        static = self.query_one(f"#{name}", Static)
        if static.content != content:
            static.update(content)

    def _fill(self, width: int) -> None:
        """Put the rows into the list; with the same rows only what they say is replaced."""
        wanted = self._wanted(width)
        options = self.query_one(ModelList)
        ids = [str(option.id) for option in options.options]
        if ids != [name for name, _, _ in wanted]:
            self._refill(options, wanted)
        self._rows = {name: row for name, _, row in wanted if row is not None}
        here = self._id_here()
        for name, row, _ in wanted:
            text = pointed(row, self._glyphs, here=name == here)
            if options.get_option(name).prompt != text:
                options.replace_option_prompt(name, text)

    def _refill(self, options: OptionList, wanted: list[tuple[str, Content, Row | None]]) -> None:
        at = options.highlighted
        before = None if at is None else options.get_option_at_index(at).id
        options.clear_options()
        options.add_options(
            [Option(text, id=name, disabled=row is None) for name, text, row in wanted]
        )
        names = [name for name, _, row in wanted if row is not None]
        if before in names or names:
            chosen = str(before) if before in names else names[0]
            options.highlighted = options.get_option_index(chosen)

    def _wanted(self, width: int) -> list[tuple[str, Content, Row | None]]:
        """Id, text and record of every row; headings have no record."""
        glyphs, found = self._glyphs, list[tuple[str, Content, Row | None]]()
        if self._library is None:
            return found  # the cursor begins on the first pack
        wanted = self.query_one(FilterLine).text
        packs = [p for p in self._library.packs if matches(wanted, p.name, p.family, *p.details)]
        jobs = [job for job in self._jobs if matches(wanted, job.model, job.kind, job.state.value)]
        offers = [o for o in self._offers() if matches(wanted, o.title, o.id, *o.about)]
        if wanted and not packs:
            words = "" if jobs or offers else "  Nothing here has these words. Esc shows all."
            found.append(("head-packs", Content(words), None))
        elif packs:
            found.append(("head-packs", Content.styled(PACK_HEAD, "$dim"), None))
        else:
            free = show_disk(self._library.free_bytes)
            empty = Content(f"  Nothing here yet. {free} are free. A adds a model.")
            found.append(("head-packs", empty, None))
        for pack in packs:
            text = pack_row(pack, glyphs, loaded=pack.name == self._loaded)
            found.append((f"pack-{pack.name}", text, pack))
        if jobs:
            found.append(("head-jobs", Content.styled("\n Jobs", "bold"), None))
            found += [(f"job-{j.id}", job_line(j, glyphs, width - 2), j) for j in jobs]
        if offers:
            head = Content.assemble(("\n To be added\n", "bold"), (OFFER_HEAD, "$dim"))
            found.append(("head-offers", head, None))
            found += [(f"offer-{o.id}", offer_row(o, glyphs, width), o) for o in offers]
        return found

    def _offers(self) -> list[Offer]:
        offers = (self._offering.result if self._offering is not None else None) or ()
        here = {pack.name for pack in (self._library.packs if self._library is not None else ())}
        return [
            offer
            for offer in offers
            if offer.fit is not Fit.NO_ROOM and self._desk.name_of(offer) not in here
        ]

    def _draw_notes(self, width: int) -> None:
        if self._problem is not None:
            self._set("notes", problem_content(self._problem, self._glyphs))
            return
        match self._here():
            case PackView() as pack:
                lines = pack_notes(pack, self._glyphs, width)
            case JobView() as job:
                lines = job_notes(job, self._glyphs, width)
            case Offer() as offer:
                lines = offer_notes(offer, width, self._glyphs)
            case _:
                lines = [Content(" The models folder is read")] if self._library is None else []
        self._set("notes", rows(lines))

    def _here(self) -> Row | None:
        """What is under the cursor."""
        return self._rows.get(self._id_here())

    def _id_here(self) -> str:
        option = self.query_one(ModelList).highlighted_option
        return "" if option is None else str(option.id)

    def _job_here(self) -> JobView | None:
        """The job under the cursor, or the one of the pack under it."""
        row = self._here()
        if isinstance(row, PackView):
            open_jobs = [j for j in self._jobs if j.state is not JobState.DONE]
            return next((job for job in open_jobs if job.model == row.name), None)
        return row if isinstance(row, JobView) else None

    # -- events and actions ----------------------------------------------------------------------

    def on_option_list_option_highlighted(self) -> None:
        self._fill(self.size.width)
        self._draw_notes(self.size.width)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Enter: load a pack, go on with a job, add a model."""
        event.stop()
        match self._here():
            case PackView(condition=PackCondition.READY) as pack:
                self.post_message(self.Load(pack.name))
            case Offer() as offer:
                self.post_message(self.Add(offer))
            case PackView() as pack if self._job_here() is None:
                words = f"{clean_line(pack.name, 40)} cannot be loaded: {pack.condition.value}."
                self.notify(words, severity="warning", markup=False)
            case PackView() | JobView():
                self.action_pause()

    def action_add(self) -> None:
        self.post_message(self.Add(None))

    def action_verify(self) -> None:
        pack = self._here()
        if not isinstance(pack, PackView):
            self.notify("Choose a model on this computer first.", severity="warning")
        elif self._do(lambda: self._desk.verify(pack.name)):
            self.notify(f"Every byte of {pack.name} is compared with its checksum.", markup=False)

    def action_repair(self) -> None:
        """Look for damage in the pack under the cursor, and mend it."""
        pack = self._here()
        if not isinstance(pack, PackView):
            self.notify("Choose a model on this computer first.", severity="warning")
        elif pack.name == self._loaded:
            self.notify("It is loaded. Load another model first.", severity="warning")
        elif self._do(lambda: self._desk.repair(pack.name)):
            words = f"{pack.name} is compared with its checksums; what is damaged is made again."
            self.notify(words, markup=False)

    def action_folder(self) -> None:
        """Show the folder of the pack under the cursor, or say where it is."""
        pack = self._here()
        if not isinstance(pack, PackView):
            self.notify("Choose a model on this computer first.", severity="warning")
            return
        try:
            path, is_shown = self._desk.show_folder(pack.name)
        except MoetError as error:
            self._say(error)
            return
        if not is_shown:
            self.app.copy_to_clipboard(str(path))
            words = (
                f"{path}\nNo desktop to show it on; the path is copied, if the terminal allows it."
            )
            self.notify(words, title="Folder", markup=False, timeout=10)

    def action_plan(self) -> None:
        """Change how the pack under the cursor is planned."""
        pack = self._here()
        if not isinstance(pack, PackView) or pack.condition is not PackCondition.READY:
            self.notify("Choose a model that is ready first.", severity="warning")
            return

        def planned(wishes: PlanWishes | None) -> None:
            if wishes is not None:
                self._keep_plan(pack.name, wishes)

        self.app.push_screen(PackPlan(self._desk, self._glyphs, pack.name), planned)

    def _keep_plan(self, name: str, wishes: PlanWishes) -> None:
        if not self._do(lambda: self._desk.save_wishes(name, wishes)):
            return
        if name != self._loaded:
            self.notify(f"{name} is planned so when it is loaded.", markup=False)
            return
        title = f"Load {clean_line(name, 40)} again now?"
        body = "The new plan is kept. It counts from when the model is loaded next."
        dialog = ConfirmDialog(title, body=body, act="Load again", keep="Later")
        self.app.push_screen(dialog, lambda yes: self._load_so(name, wishes) if yes else None)

    def _load_so(self, name: str, wishes: PlanWishes) -> None:
        self.post_message(self.Load(name, wishes))

    def action_filter(self) -> None:
        self.query_one(FilterLine).open()

    def _refilter(self) -> None:
        self._fill(self.size.width)
        self._draw_notes(self.size.width)

    def action_sign_in(self) -> None:
        """Ask for a hub token; a job that was refused without goes on afterwards."""
        job = self._job_here()
        refused = job if job is not None and may_sign_in(job.error) else None
        error = None if refused is None else refused.error

        def signed_in(yes: bool | None) -> None:
            if yes and refused is not None:
                self._do(lambda: self._desk.resume(refused.id))
            elif yes:
                self.notify("You are signed in.")

        self.app.push_screen(SignInDialog(self._desk, self._glyphs, error), signed_in)

    def action_pause(self) -> None:
        job = self._job_here()
        if job is None:
            self.notify("There is no job here.", severity="warning")
        elif may_sign_in(job.error):
            self.action_sign_in()
        elif job.state in (JobState.RUNNING, JobState.STALLED):
            self._do(lambda: self._desk.pause(job.id))
        else:
            self._do(lambda: self._desk.resume(job.id))

    def action_delete(self) -> None:
        """Ask, then delete the pack or cancel the job under the cursor."""
        match self._here():
            case PackView() as pack if pack.name == self._loaded:
                self.notify("It is loaded. Load another model first.", severity="warning")
            case PackView() as pack:
                title, body = delete_question(pack)
                self._ask(title, body, "Delete", lambda: self._remove(pack.name))
            case JobView() as job:
                body = "It stops and leaves this list. What is finished stays on disk."
                title = f"Cancel {job.kind} of {clean_line(job.model, 40)}?"
                self._ask(title, body, "Cancel the job", lambda: self._cancel(job.id))

    def _ask(self, title: str, body: str, act: str, then: Callable[[], None]) -> None:
        dialog = ConfirmDialog(title, body=body, act=act, keep="Keep")
        self.app.push_screen(dialog, lambda yes: then() if yes else None)

    def _remove(self, name: str) -> None:
        self._removing = Background(lambda: self._desk.remove(name), name="remove")

    def _cancel(self, job_id: str) -> None:
        self._do(lambda: self._desk.cancel(job_id))

    def _do(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except MoetError as error:
            self._say(error)
            return False
        self._due_s = 0.0
        return True

    def _say(self, error: MoetError) -> None:
        self.notify(
            f"{error.cause}\n{error.do}", title=f"{error.title}  {error.code}",
            severity="error", markup=False, timeout=10,
        )  # fmt: skip
