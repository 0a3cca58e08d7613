#!/bin/sh
# A walk through the command line; `make demo` runs it. Writes into out/ only.
set -eu
mkdir -p out
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { say "\$ stretto $*"; stretto "$@"; }

say "DualPipe (DeepSeek-V3): two opposite pipelines over the same devices, woven in pairs."
run show dualpipe --devices 4 --microbatches 8
say "Kimi K2's interleaved 1F1B: one more warm-up forward, so that every steady slot is a pair."
run show interleaved --overlap --devices 4 --microbatches 8
say "All schedules at the same work: time, idle share, and what each costs in memory."
run compare --devices 8 --microbatches 32 --cost F=1,I=1,W=1,FB=2.7
say "A model of 14 MoE layers, in phases: how much expert dispatch and combine no compute hides (comm)."
run compare 1f1b interleaved dualpipe dualpipev --overlap --devices 4 --microbatches 16 \
  --layers 'embedding,moe*14,loss' --costs examples/phases.toml
say "A plan is a CSV that PyTorch reads too. Swap two actions on each device and check says what goes wrong."
run show 1f1b --devices 2 --microbatches 2 -o out/plan.csv
sed 's/1B0,1F1/1F1,1B0/; s/0F0,0F1,0B0/0F0,0B0,0F1/' out/plan.csv > out/broken.csv
run check out/plan.csv
run check out/broken.csv || say "exit code $?: not sound, so nothing here would run it."
