from resharder.client.cli import main

main()
