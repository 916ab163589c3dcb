"""An S3 server on this machine that can deny requests, and a count of what a process fetches from a URL."""

import io
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_bucket(folder: Path, bucket: str, denied: Collection[str] = ()) -> Iterator[str]:
    """A context with an empty bucket, whose URL it gives; processes started in it find the server and its keys.

    Requests to read or delete objects whose names contain a word of ``denied`` are refused; the collection may change
    meanwhile. fsspec's cache of file systems is cleared, because it could hold one of an earlier server.
    """
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    running: Any = server._server
    running.app = _denying(running.app, denied)
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "key"}
        for name, value in {**settings, "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}.items():
            patch.setenv(name, value)
        patch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir(bucket)
        yield f"s3://{bucket}"
    server.stop()


def _denying(app: Callable[..., Any], denied: Collection[str]) -> Callable[..., Any]:
    """The server's application, with denied requests refused as S3 does: reads with status 403, deletions with 200."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        reads, deletes = environ["REQUEST_METHOD"] == "GET", environ["QUERY_STRING"] == "delete"
        asked = environ["PATH_INFO"] if reads else ""
        if deletes and denied:
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            asked, environ["wsgi.input"] = body.decode(), io.BytesIO(body)
        if not any(word in asked for word in denied):
            return app(environ, start)
        error = "<Code>AccessDenied</Code><Message>Access Denied</Message>"
        text = f"<DeleteResult><Error><Key>denied</Key>{error}</Error></DeleteResult>" if deletes else ""
        start("200 OK" if deletes else "403 Forbidden", [("Content-Type", "application/xml")])
        return [(text or f"<Error>{error}</Error>").encode()]

    return answer


def count_fetches(cache: str, url: str, log: str, block_bytes: int, order: list[int]) -> int:
    """Reads the windows ``order`` of 50 tokens of a token file at a URL; returns the sum of their tokens.

    The start of each fetched block is appended to the file ``log``. Changes this process's block size.
    """
    import data.block_cache as block_cache
    import data.remote_tokens as remote_tokens
    from data.remote import RemoteObject
    from data.remote_index import bring_index
    from data.tokenfile import TokenFile

    block_cache.BLOCK_BYTES = remote_tokens.BLOCK_BYTES = block_bytes
    fetch = RemoteObject.fetch

    def told(self: RemoteObject, start: int, stop: int) -> bytes:
        if self.url.endswith(".bin"):
            with open(log, "a") as file:
                file.write(f"{start}\n")
        return fetch(self, start, stop)

    RemoteObject.fetch = told
    tokens, total = TokenFile(bring_index(url, Path(cache), 1 << 30)).tokens, 0
    for place in order:
        total += int(tokens[place * 50 : place * 50 + 50].astype("int64").sum())
    return total
