from refvl.cli import main

main()
