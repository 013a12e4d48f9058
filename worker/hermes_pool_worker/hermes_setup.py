"""Gets Hermes ready in a worker: its environment, its configuration, its agent object.

Much of Hermes reads the environment and the configuration while it is imported. So Hermes is imported inside functions:
first the environment is set, then the configuration is put in place, and only then the rest is imported.
"""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from hermes_pool_worker.agent import MissingDependencyError

HERMES: Final = "hermes-agent==0.19.0"
PLATFORM: Final = "hermes-pool"
"""The name under which Hermes files these sessions (column ``source``)."""

QUIET: Final[dict[str, Any]] = {
    "agent": {"environment_probe": False},
    "approvals": {"mode": "manual"},
    "memory": {"nudge_interval": 0},
    "skills": {"creation_nudge_interval": 0},
}
"""Defaults for Hermes in a worker: no subprocesses that probe the environment at the start; questions about dangerous
commands go to a person, not to a second model; and an idle worker does not start reviews by the model."""

_FOREIGN: Final = (
    "HERMES_CRON_SESSION", "HERMES_GATEWAY_SESSION", "HERMES_INTERACTIVE", "HERMES_UI_SESSION_ID", "TERMINAL_CWD",
)  # fmt: skip
_CERTIFICATES: Final = ("HERMES_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class HermesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``agent_options`` of ``agent="hermes"``. Defaults come from the user's Hermes configuration."""

    model: str | None = None
    """Name of the model."""
    provider: str | None = None
    """Hermes' name for the provider; ``custom`` if only ``base_url`` is given."""
    base_url: str | None = None
    """URL of an OpenAI-compatible server."""
    api_key: str | None = None
    """Key for the provider or the server."""
    context_length: int | None = None
    """Context window of the model, in tokens. With it, Hermes need not ask the server."""
    max_iterations: int | None = None
    """How many model calls one turn may take."""
    system_prompt: str | None = None
    """Added after Hermes' own system prompt; not stored with the session."""
    enabled_toolsets: list[str] | None = None
    """Hermes' toolsets to offer. Default: those that are enabled for Hermes' command line."""
    disabled_toolsets: list[str] | None = None
    """Toolsets to leave out of these."""
    approvals: Literal["ask", "off"] | None = None
    """``ask``: the caller is asked about dangerous commands. ``off``: they run without a question. Default: ``ask``,
    unless the user's Hermes configuration says otherwise."""
    cwd: str | None = None
    """Folder in which the tools start. Default: the worker's own."""
    config: dict[str, Any] = {}
    """Overrides for Hermes' ``config.yaml``, in the same structure, for this worker only."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "HermesOptions":
        """Return the checked options; raise ``MissingDependencyError`` with what is wrong with them."""
        try:
            return msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise MissingDependencyError(
                f"agent_options of the agent 'hermes': {error}. The options are: {known}"
            ) from error

    def overlay(self) -> dict[str, Any]:
        """Return everything that overrides Hermes' configuration.

        The model is part of it and not only an argument of the agent's constructor, because compaction, delegation and
        other parts of Hermes look it up in the configuration.
        """
        model: dict[str, Any] = {"default": self.model, "context_length": self.context_length}
        if self.provider or self.base_url:
            # The URL and the key of one provider are useless for another, so they are replaced together.
            model["provider"] = self.provider or "custom"
            model["base_url"] = self.base_url or ""
            model["api_key"] = self.api_key or ""
        elif self.api_key:
            model["api_key"] = self.api_key
        overlay: dict[str, Any] = {"model": {key: value for key, value in model.items() if value is not None}}
        if self.approvals is not None:
            overlay["approvals"] = {"mode": "manual" if self.approvals == "ask" else "off"}
        if self.cwd is not None:
            overlay["terminal"] = {"cwd": self.cwd}
        return merged(overlay, self.config)


def import_hermes(options: HermesOptions) -> dict[str, Any]:
    """Import Hermes and return its configuration; raise ``MissingDependencyError`` if an import fails."""
    _clean_environment()
    try:
        _put_configuration_in_place(options.overlay())
        import run_agent  # noqa: F401, PLC0415
        from hermes_cli.config import load_config  # noqa: PLC0415
        from tools import approval  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            f"Hermes Agent cannot be imported ({error}). Install it for the workers' interpreter, for example with "
            f"{sys.executable} -m pip install {HERMES}"
        ) from error
    approval.save_permanent_allowlist = _save_allowlist
    _trust_certifi()
    config: dict[str, Any] = load_config()
    return config


def build_agent(
    config: dict[str, Any], options: HermesOptions, session_id: str | None, database: Any, callbacks: Mapping[str, Any]
) -> Any:
    """Return Hermes' agent object, with the model and the tools that Hermes' own command line would use.

    Raise ``MissingDependencyError`` if no model is configured.
    """
    from hermes_cli.auth import AuthError, is_rate_limited_auth_error  # noqa: PLC0415
    from hermes_cli.fallback_config import get_fallback_chain  # noqa: PLC0415
    from hermes_cli.mcp_startup import start_background_mcp_discovery, wait_for_mcp_discovery  # noqa: PLC0415
    from hermes_cli.runtime_provider import resolve_runtime_provider  # noqa: PLC0415
    from hermes_cli.tools_config import _get_platform_tools  # noqa: PLC0415 - what Hermes' own entries all call
    from hermes_constants import resolve_reasoning_config  # noqa: PLC0415
    from run_agent import AIAgent  # noqa: PLC0415

    model = str((config.get("model") or {}).get("default") or "")
    toolsets = options.enabled_toolsets
    if config.get("mcp_servers"):
        start_background_mcp_discovery(logger=logging.getLogger(__name__), thread_name="mcp-discovery")
        wait_for_mcp_discovery()
    try:
        runtime = resolve_runtime_provider(target_model=model or None)
        return AIAgent(
            model=model,
            **{key: runtime.get(key) for key in ("provider", "base_url", "api_key", "api_mode", "credential_pool")},
            acp_command=runtime.get("command"),
            acp_args=list(runtime.get("args") or []),
            fallback_model=get_fallback_chain(config) or None,
            reasoning_config=resolve_reasoning_config(config, model),
            max_iterations=options.max_iterations or int((config.get("agent") or {}).get("max_turns") or 90),
            enabled_toolsets=sorted(_get_platform_tools(config, "cli")) if toolsets is None else toolsets,
            disabled_toolsets=options.disabled_toolsets,
            ephemeral_system_prompt=options.system_prompt,
            session_id=session_id,
            session_db=database,
            platform=PLATFORM,
            quiet_mode=True,
            # By default Hermes sleeps for a second between two tool calls.
            tool_delay=0,
            **callbacks,
        )
    except (AuthError, RuntimeError, ValueError) as error:
        if isinstance(error, AuthError) and is_rate_limited_auth_error(error):
            raise
        raise MissingDependencyError(
            f"Hermes has no model to talk to: {error} Choose one with `hermes model` in the HERMES_HOME of the "
            "workers, or set model, base_url and api_key in agent_options."
        ) from error


def adopt_session(agent: Any, session_id: str, database: Any) -> None:
    """Switch an agent that was built for a new session to a stored one, as Hermes' own ``/resume`` does."""
    from gateway.session_context import set_current_session_id  # noqa: PLC0415

    agent.session_id = session_id
    os.environ["HERMES_SESSION_ID"] = session_id
    set_current_session_id(session_id)
    agent.reset_session_state()
    agent._invalidate_system_prompt()  # noqa: SLF001 - so that it uses the stored prompt of the session
    compressor = getattr(agent, "context_compressor", None)
    if compressor is not None and hasattr(compressor, "bind_session_state"):
        compressor.bind_session_state(session_db=database, session_id=session_id)
    memory = getattr(agent, "_memory_manager", None)
    if memory is not None:
        memory.on_session_switch(session_id, parent_session_id="", reset=False, reason="resume")


def files_read() -> list[str]:
    """Return the files that imports and configuration depend on: Hermes' settings, its keys, and Hermes itself."""
    import run_agent  # noqa: PLC0415
    from hermes_cli.config import get_config_path  # noqa: PLC0415

    config = get_config_path()
    return [str(config), str(config.with_name(".env")), str(run_agent.__file__)]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over`` merged into it, at every level."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _clean_environment() -> None:
    """Remove the variables of other Hermes sessions, and set those that Hermes reads while it is imported."""
    for name in list(os.environ):
        if name.startswith("HERMES_SESSION_") or name in _FOREIGN:
            del os.environ[name]
    # Without this, Hermes installs packages into its own environment during a start.
    os.environ.setdefault("HERMES_DISABLE_LAZY_INSTALLS", "1")
    # Without this, a process that has no terminal runs dangerous commands unasked. ``approvals: off`` still works.
    os.environ.setdefault("HERMES_EXEC_ASK", "1")


def _trust_certifi() -> None:
    """Point Hermes to the file of certificates. Otherwise it collects them again and again: most of a turn's CPU time.

    Call this after the import, which reads Hermes' ``.env``: certificates that the user names there, or in the
    environment, take precedence.
    """
    if not any(os.environ.get(name) for name in _CERTIFICATES):
        import certifi  # noqa: PLC0415 - one of Hermes' dependencies, not of the worker's

        os.environ["HERMES_CA_BUNDLE"] = certifi.where()


def _put_configuration_in_place(overlay: dict[str, Any]) -> None:
    """Put ``QUIET`` below the user's ``config.yaml`` and ``overlay`` above it, in this process only.

    At each load Hermes copies ``DEFAULT_CONFIG`` and merges the user's file over it, so ``QUIET`` goes there: the user
    can override it. Over that it merges an administrator's file, which ``load_managed_config`` returns. The overlay
    goes there, below the administrator's values.
    """
    from hermes_cli import config, managed_scope  # noqa: PLC0415

    defaults = merged(config.DEFAULT_CONFIG, QUIET)
    config.DEFAULT_CONFIG.clear()
    config.DEFAULT_CONFIG.update(defaults)
    demanded = managed_scope.load_managed_config
    managed_scope.load_managed_config = lambda: merged(overlay, demanded())


def _save_allowlist(patterns: set[str]) -> None:
    """Store the commands that a person has allowed ``always``, where Hermes looks for them.

    Hermes' own function rewrites the whole configuration, and loses the user's comments and every value that an overlay
    covers. This one changes a single key.
    """
    from hermes_cli.config import get_config_path, read_raw_config  # noqa: PLC0415
    from utils import atomic_roundtrip_yaml_update  # noqa: PLC0415 - Hermes' module of this name

    stored = read_raw_config().get("command_allowlist") or []
    atomic_roundtrip_yaml_update(get_config_path(), "command_allowlist", sorted({*stored, *patterns}))
