"""The demo behind ``lightning-resume demo``: a job that is killed again and again, beside one that is not.

``job.py`` is the training script, and reads as an example. ``recording.py`` writes down what each batch left behind,
``driver.py`` starts and kills the job's processes, ``comparison.py`` says what is equal, and ``report.py``,
``display.py`` and ``plot.py`` show it; ``show.py`` calls them in turn. Only ``job.py`` and ``recording.py`` import
torch and Lightning; they run in the job's processes.
"""
