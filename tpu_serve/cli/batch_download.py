"""A batch's input file from a URL."""

from __future__ import annotations

import http.client
import shutil
import tempfile
import urllib.error
import urllib.request
from typing import BinaryIO, cast

from tpu_serve.config import ConfigError

SECONDS = 60.0
"""How long a server may say nothing."""


def download(url: str) -> BinaryIO:
    """The whole file, in a temporary one: answering takes longer than servers wait for a reader.

    Raises:
      ConfigError: it cannot be downloaded.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as response:
            shutil.copyfileobj(response, file)
            missing = int(response.headers.get("content-length") or file.tell()) - file.tell()
        if missing > 0:
            raise http.client.IncompleteRead(b"", missing)
    except urllib.error.HTTPError as error:
        error.close()
        file.close()
        raise ConfigError(f"{url} cannot be read: the server answered {error.code} {error.reason}.") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        file.close()
        why = getattr(error, "reason", None) or error
        raise ConfigError(f"{url} cannot be read: {why}.") from None
    file.seek(0)
    return cast(BinaryIO, file)
