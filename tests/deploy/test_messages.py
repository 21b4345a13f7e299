"""The list of messages is that of the sources, so that its diff shows each message that a change brings."""

import ast

from tools.messages import LIST, messages, page


def test_the_list_has_every_message() -> None:
    assert LIST.read_text() == page(), "run `make docs-messages`, and read its diff aloud"


def test_a_list_has_texts_of_errors_logs_and_help_but_no_docstrings() -> None:
    source = '''
"""Do something that no user reads."""
_log.warning("set_failed", reason=str(error))
raise UsageError(f"fleet {fleet.name} has no {what or 'such server'} here")
Option(help="Only this server, by its id.")
'''
    expected = ["[warning] set_failed reason=…", "fleet {name} has no {what} here", "Only this server, by its id."]
    assert list(messages(ast.parse(source))) == expected
