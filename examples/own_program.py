"""A program of your own: two devices, three lanes, plain functions; checked, simulated, executed, drawn, compared."""

import time

import stretto
from stretto import Call

calls = []
for k in range(4):
    calls += [
        Call(f"load{k}", 0, "disk", needs=[f"work{k - 2}"] if k > 1 else []),  # there is room for two
        Call(f"work{k}", 0, "compute", needs=[f"load{k}"]),
        Call(f"hand{k}", 0, "link", needs=[f"work{k}"]),  # one name on two devices: two ends of one thing
        Call(f"hand{k}", 1, "link"),
        Call(f"use{k}", 1, "compute", needs=[f"hand{k}"]),
    ]
program = stretto.program_of(calls)
print(stretto.check(program))  # [] if it is sound

seconds = {"load": 0.02, "work": 0.03, "hand": 0.01, "use": 0.02}
simulated = stretto.simulate(program, stretto.Costs(calls=seconds, unit="s"))
measured = stretto.execute(program, lambda task: lambda: time.sleep(seconds[str(task)[:-1]]))
print(stretto.draw_text(measured, width=80))
fitted = {name: round(time, 4) for name, time in stretto.fit(measured).calls.items()}
print(f"it took {measured.makespan / simulated.makespan:.2f} of the predicted time; {fitted}")
stretto.draw_comparison({"simulated": simulated, "measured": measured}, "own.svg")
