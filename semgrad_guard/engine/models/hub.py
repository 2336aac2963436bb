"""Whether the Hugging Face hub answers: asked once, where transformers would ask file by file, each with retries."""

from __future__ import annotations

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError


def why_unreachable(name: str, revision: str | None = None) -> str | None:
    """Why the hub cannot be asked for a repository; None where it answers, even if it says that there is none.

    One request of huggingface_hub's own (with its proxies, HF_ENDPOINT and token) and with its own patience: an answer
    may take HF_HUB_ETAG_TIMEOUT seconds, 10 by default.
    """
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, HFValidationError):
        return None
    except Exception as error:  # noqa: BLE001 - whose errors these are (httpx, httpx2) depends on huggingface_hub
        return f"{constants.ENDPOINT} does not answer, {str(error) or type(error).__name__}"
    return None
