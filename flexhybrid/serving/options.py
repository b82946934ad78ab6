"""Options of ``flexhybrid serve``, and the checks that need no heavy imports."""

import socket
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from flexhybrid.arguments import LLMArguments, option
from flexhybrid.batch.formats import ChatRules
from flexhybrid.core.errors import InputError, check, flag
from flexhybrid.core.policy import Policy
from flexhybrid.core.units import parse_bytes
from flexhybrid.jobs.paths import check_checkpoint
from flexhybrid.jobs.run.options import read_chat_rules
from flexhybrid.sampling_params import SamplingParams
from sim import catalogue

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "python_multipart")  #: what the server imports
LOCAL = ("127.0.0.1", "localhost", "::1")  #: hosts that no other machine reaches


@dataclass(frozen=True)
class ServerOptions:
    """The command's flags by name."""

    llm: LLMArguments
    host: str = option("address to listen at; 0.0.0.0: all of this machine's (default: 127.0.0.1)", "127.0.0.1")
    port: int = option("port to listen at; 0: any free one (default: 8000)", 8000)
    api_key: str | None = option("key that clients must send (default: $FLEXHYBRID_API_KEY, or none)", None)
    served_model_name: str | None = option(
        "name by which clients ask for the model (default: the folder's)", None, metavar="NAME"
    )
    max_model_len: int | None = option(
        "most tokens of a prompt and its answer (default: the model's context, at most 8192)", None, metavar="N"
    )
    max_num_seqs: int | None = option("most answers at a time (default: what memory holds)", None, metavar="N")
    input_len: int = option("expected tokens of a prompt, for policy auto and memory (default: 512)", 512)
    output_len: int = option("expected tokens of an answer, for the same (default: 128)", 128)
    max_queue_len: int = option("most answers that wait; further requests get status 429 (default: 1024)", 1024)
    max_body_size: str = option("largest body of a request (default: 4MiB)", "4MiB")
    request_timeout: float = option("most seconds of a request (default: 600)", 600.0, metavar="SECONDS")
    chat_template: Path | None = option("Jinja template of chats (default: the tokenizer's)", None, metavar="FILE")
    chat_template_kwargs: str | None = option(
        'default variables of the chat template, like {"enable_thinking": false}', None, metavar="JSON"
    )
    files_dir: Path | None = option("folder of /v1/files and /v1/batches (default: neither is served)", None)
    reprofile: bool = option("measure this machine again for policy auto", False)
    quiet: bool = option("print nothing but errors", False)
    sampling: dict = field(default_factory=dict)  #: default sampling parameters of requests

    @property
    def body_bytes(self) -> int:
        return parse_bytes(self.max_body_size) or 0

    @property
    def name(self) -> str:
        """The name of the model for clients."""
        return self.served_model_name or Path(self.llm.model).resolve().name

    def chat_rules(self) -> ChatRules:
        """Return the rules for chats. Raise InputError if the template or its variables cannot be read."""
        return ChatRules(False, None, *read_chat_rules(self.chat_template, self.chat_template_kwargs))


def check_server_options(options: ServerOptions) -> None:
    """Raise InputError for wrong values, and packages that are not installed."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise InputError(f"serve needs {', '.join(missing)}: pip install 'flexhybrid[serve]'")
    check("--port", options.port, 0 <= options.port < 1 << 16, "from 0 to 65535")
    for name in ("input_len", "output_len", "max_queue_len", "max_num_seqs"):
        value = getattr(options, name)
        check(flag(name), value, value is None or value >= 1, "at least 1")
    check("--request-timeout", options.request_timeout, options.request_timeout > 0, "above 0")
    check("--max-body-size", options.max_body_size, options.body_bytes >= 1, "at least 1")
    check("--api-key", options.api_key, options.api_key is None or options.api_key.isascii(), "ASCII text")
    SamplingParams(**options.sampling)
    options.chat_rules()
    check_checkpoint(Path(options.llm.model))
    if str(options.llm.policy).endswith(".json"):
        Policy.load(str(options.llm.policy))
    if isinstance(options.llm.hardware, (str, Path)):
        catalogue.load(options.llm.hardware)
    listener_at(options.host, options.port).close()


def listener_at(host: str, port: int) -> socket.socket:
    """Return a socket with this address, which does not listen yet. Raise InputError if it is in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InputError(f"cannot listen at {host}, port {port}: {error.strerror}; give another --port") from None
    return listener
