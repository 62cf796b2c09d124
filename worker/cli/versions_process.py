"""The entry point of the versions process. The worker starts it with its own options and variables.

    python -m worker.cli.versions_process --broker …

Its standard input is a socket. It ends when that is closed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from worker.cli.options.brokers import connection, secret, topic_names
from worker.cli.options.parser import build_parser, resolve
from worker.cli.worker import COMMAND, configure_log
from worker.errors import AdcascadeError
from worker.kafka.versions import run_versions

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Read and prepare versions until the worker ends this process."""
    try:
        options = resolve(build_parser(COMMAND, "adcascade worker").parse_args(arguments))
        brokers = connection(options)
        configure_log(options, brokers, secret(options, "token-secret"))
        return run_versions(brokers, topic_names(options))
    except AdcascadeError as error:
        log.error("%s", error)  # the worker starts it again
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
