from refvl.tools.cli import main

main()
