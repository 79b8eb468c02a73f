"""The cost of a run, computed from its configuration without a GPU, for any number of ranks.

Each module imports only modules above it:

- task_cost.py: `TaskCost`, with which a task describes what its models cost
- stages.py: parallel sizes of a run, and the stages of its pipeline
- weights.py: the weights of a model as its ranks hold them
- state.py: exact bytes that a rank keeps between steps
- kernels.py: numbers of kernels, operations and bytes in a step, by class of kernels
- hardware.py: rates that GPUs reach
- pipeline.py: the schedule of a step, priced from as few micro-batches as decide it
- network.py: `Network`, the formulas of a model's cost
- host_memory.py: the check of a run on CPUs before it starts
- memory.py: peak memory of each pipeline rank
- muon.py: operations and messages of the Muon optimizer
- step_time.py: time of a step
- switch.py: `Switch`, a choice that a search makes besides the layout
- layouts.py: the layouts that a search tries, and the flags of each
- search.py: the search for the fastest layouts
- sheet.py: tables and reports, which are printed or written as JSON
- budget.py: time of a step by class of kernels
- report.py: the output of ``--dry-run`` and ``tools/plan.py``
- proposal.py: the report of a search, and its commands
"""
