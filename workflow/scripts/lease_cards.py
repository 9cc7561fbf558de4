"""Run a command with GPUs of its own: `lease_cards.py --cards N [--devices 5,6] -- COMMAND …`."""

import argparse
import sys
from signal import SIGINT

from mfubench.config import ConfigError
from mfubench.job import add_card_arguments, cards_for_job
from mfubench.stop_signals import run_handing_on

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_card_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        with cards_for_job(arguments):
            # the cards are given back once the command has ended; a terminal's Ctrl-C reaches it by itself
            sys.exit(run_handing_on(command, lambda process, number: number != SIGINT and process.send_signal(number)))
    except (ConfigError, TimeoutError) as error:
        sys.exit(f"error: {error}")
