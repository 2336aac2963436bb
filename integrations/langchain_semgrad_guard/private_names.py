"""The names of LangChain that are not public and on which withholding depends."""

from __future__ import annotations

from langchain_core.language_models.chat_models import BaseChatModel

from semgrad_guard.adapters.frameworks import absent_names

NAMES = {
    "langchain_core.language_models.chat_models:BaseChatModel": (
        "_generate_with_cache",
        "_agenerate_with_cache",
        "_should_stream",
        "_should_use_protocol_streaming",
        "_replay_v2_events_for_cache_hit",
        "_areplay_v2_events_for_cache_hit",
        "_convert_cached_generations",
        "_convert_input",
        "_get_invocation_params",
        "_get_ls_params",
        "_resolve_model_profile",
        "_serialized",
    ),
    "langchain_core.runnables.config": (
        "ContextThreadPoolExecutor",
        "get_config_list",
        "run_in_executor",
        "var_child_runnable_config",
    ),
    "langchain_core.runnables.utils": ("coro_with_context",),
    "langchain_core.tracers._streaming": ("_StreamingCallbackHandler", "_V2StreamingCallbackHandler"),
    "langchain_core.tracers.context": ("_configure_hooks", "register_configure_hook", "tracing_v2_callback_var"),
    "langchain_core.utils.utils": ("LC_ID_PREFIX",),
}
USES = {
    BaseChatModel.generate: ("_generate_with_cache", "on_chat_model_start"),
    BaseChatModel.agenerate: ("_agenerate_with_cache", "on_chat_model_start"),
    BaseChatModel.stream: ("_stream", "_should_stream", "on_chat_model_start"),
    BaseChatModel.astream: ("_astream", "_should_stream", "on_chat_model_start"),
}
"""An override that LangChain never calls would withhold nothing."""

ABSENT = tuple(absent_names(NAMES, USES))
"""Those that the installed LangChain lacks."""
