"""Keys that work on every screen, and the ids of all keys. Data; no state."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from moet_desk.ui.screens.attach import AttachDialog
from moet_desk.ui.screens.cache import CacheScreen
from moet_desk.ui.screens.chat import ChatScreen
from moet_desk.ui.screens.chat_list import ChatList
from moet_desk.ui.screens.chat_options import ChatOptions, Choice
from moet_desk.ui.screens.doctor import DoctorScreen
from moet_desk.ui.screens.endpoint import EndpointScreen
from moet_desk.ui.screens.help import HelpPanel
from moet_desk.ui.screens.log import LogScreen
from moet_desk.ui.screens.models import ModelList, ModelsScreen
from moet_desk.ui.screens.pack_plan import PackPlan
from moet_desk.ui.screens.settings import SettingsScreen
from moet_desk.ui.screens.setup import SetupScreen
from moet_desk.ui.widgets.cache_lists import CacheLines
from moet_desk.ui.widgets.filter_line import FilterLine
from moet_desk.ui.widgets.find_line import FindLine
from moet_desk.ui.widgets.heatmap import Heatmap
from moet_desk.ui.widgets.offer_list import Offers
from moet_desk.ui.widgets.problem import ConfirmDialog
from moet_desk.ui.widgets.prompt import Prompt
from moet_desk.ui.widgets.sign_in import SignInDialog
from moet_desk.ui.widgets.transcript import Transcript

APP_KEYS: list[BindingType] = [
    Binding("f2", "go('chat')", "Chat", id="go.chat", priority=True, show=False),
    Binding("f3", "go('cache')", "Cache", id="go.cache", priority=True, show=False),
    Binding("f4", "go('models')", "Models", id="go.models", priority=True, show=False),
    Binding("f5", "go('endpoint')", "Endpoint", id="go.endpoint", priority=True, show=False),
    Binding("f6", "go('settings')", "Settings", id="go.settings", priority=True, show=False),
    Binding("f8", "go('log')", "Log", id="go.log", priority=True, show=False),
    Binding("f7", "go('doctor')", "Doctor", id="go.doctor", priority=True, show=False),
    Binding(
        "f12", "playback('toggle')", "Play or pause", id="playback.pause", priority=True,
        show=False,
    ),
    Binding("comma", "playback('back')", "Back", id="playback.back", show=False),
    Binding(
        "full_stop", "playback('forward')", "Forward", id="playback.forward", show=False
    ),
    Binding("minus", "playback('slower')", "Slower", id="playback.slower", show=False),
    Binding("plus", "playback('faster')", "Faster", id="playback.faster", show=False),
    Binding("ctrl+p", "command_palette", "Commands", id="app.palette", priority=True),
    Binding("f1", "help", "Help", id="app.help", priority=True),
    Binding("ctrl+q", "leave", "Quit", id="app.quit", priority=True, show=False),
    Binding(
        "ctrl+c", "copy_or_stop", "Copy or stop", id="app.copy_or_stop", priority=True,
        show=False,
    ),
    Binding("question_mark", "help", "Help", id="app.help_letter", show=False),
    Binding("1", "go('chat')", "Chat", id="go.chat_digit", show=False),
    Binding("2", "go('cache')", "Cache", id="go.cache_digit", show=False),
    Binding("3", "go('models')", "Models", id="go.models_digit", show=False),
    Binding("4", "go('endpoint')", "Endpoint", id="go.endpoint_digit", show=False),
    Binding("5", "go('settings')", "Settings", id="go.settings_digit", show=False),
    Binding("7", "go('log')", "Log", id="go.log_digit", show=False),
    Binding("6", "go('doctor')", "Doctor", id="go.doctor_digit", show=False),
]  # fmt: skip
"""Of the app itself."""


def binding_ids() -> tuple[str, ...]:
    """All action ids that `[keys]` may name, in the order of the help; a public contract."""
    owners = (
        Prompt, ChatScreen, Transcript, FindLine, AttachDialog, ChatOptions, Choice,
        CacheScreen, Heatmap, CacheLines, ModelsScreen, ModelList, EndpointScreen,
        SettingsScreen, DoctorScreen, LogScreen,
        PackPlan, SetupScreen, Offers, FilterLine, SignInDialog, ChatList, ConfirmDialog,
        HelpPanel,
    )  # fmt: skip
    return tuple(
        binding.id
        for bindings in (*(owner.BINDINGS for owner in owners), APP_KEYS)
        for binding in bindings
        if isinstance(binding, Binding) and binding.id is not None
    )
