"""An S3 server on this machine, and a store of files whose answers can be made to fail."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_bucket(folder: Path, bucket: str) -> Iterator[str]:
    """The URL of an empty bucket; every process started within it finds its server and keys.

    fsspec keeps file systems: one of an earlier server in this process would be asked again.
    """
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
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


def count_fetches(cache: str, url: str, log: str, block_bytes: int, order: list[int]) -> int:
    """A process: reads all tokens of a file at a URL, a window at a time, and writes down what it fetched."""
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
