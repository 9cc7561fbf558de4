"""Record the machine that a study is measured on: cards, driver, processor, kernel packages."""

from mfubench.endings import faults_told
from mfubench.machine import main

if __name__ == "__main__":
    with faults_told():
        main()
