"""The form of the pages whose commands are run."""

import pytest

from tests.support.console_docs import Step, difference, steps

PAGE = """\
# A page

```console
$ resharderd --listen 127.0.0.1:7677 &
$ resharder fleet set \\
    --rolling 2
policy targets latest
  and more

$ resharder status
```

```
$ this is not run
```

<!-- install -->
```console
$ pip install resharder
```

```console
$ resharder gc
```
"""


def test_commands_are_read_with_their_output_and_where_they_stand() -> None:
    found = steps(PAGE)
    assert found == [
        Step("resharderd --listen 127.0.0.1:7677 &", "", 4),
        Step("resharder fleet set \\\n    --rolling 2", "policy targets latest\n  and more", 5),
        Step("resharder status", "", 10),
        Step("resharder gc", "", 23),
    ]
    assert [step.stays for step in found] == [True, False, False, False]
    assert [step.command for step in steps(PAGE, install=True)][-2:] == ["pip install resharder", "resharder gc"]
    with pytest.raises(ValueError, match=r"line 2: expected a console block to begin with `\$ command`"):
        steps("```console\noutput first\n```\n")


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        ("", ""),
        ("policy  wants 2", "policy     wants   2  \n"),
        ("at …:7677, started …Z", "at 127.0.0.1:7677, started 2026-01-01 00:00:00Z\n"),
        ("a\n…\nd", "a\nb\nc\nd\n"),
        ("a\n…\nd", "a\nd\n"),
        ("…", ""),
        ("…", "a\nb"),
        ("a (b) [c]* …", "a (b) [c]* anything"),
        ("a\n\nb", "a\n\nb\n"),
    ],
)
def test_an_output_is_what_the_page_says(expected: str, got: str) -> None:
    assert difference(expected, got) == ""


@pytest.mark.parametrize(
    ("expected", "got", "message"),
    [
        ("policy wants 2", "policy wants 3", "'policy wants 2'"),
        ("a\nb", "a\nc", "'b'"),
        ("a …", "a\nb", "expected the line 'a …'"),
        ("a", "a\nb", "expected no line after 'a'"),
        ("", "a", "expected no line after 'nothing'"),
        ("a\n…\nd", "a\nb", "'d'"),
        ("a", "", "'a'"),
    ],
)
def test_an_output_that_differs_is_said_with_the_first_line_that_does(expected: str, got: str, message: str) -> None:
    assert message in difference(expected, got)
