"""A table of wrong inputs and the sentences that users get for them: one YAML file per kind of input.

A row of a file:

    - name: a negative learning rate      # a sentence or a phrase, unique in its file
      files: {run.yaml: "learner: {lr: -1}", notes.bin: {base64: "/wA="}}
      make: huge_integer                  # optional: a function of builders.py, for files that no text can hold
      arguments: [--config, "{folder}/run.yaml"]
      says: ["run.yaml: learner.lr: input should be greater than 0"]

`{folder}` stands for the temporary folder with the files. It is also the working folder, and the first folder of
`sys.path`, so that users' modules can be imported. `says` has one entry per sentence, in the order of the sentences; an
entry is a fragment of the sentence, or a list of fragments. Base settings (`BASE`) come before the arguments, and any
file or flag of a row overrides them.

Two more keys are optional. `alone: true` runs the row in another process with limits of memory and processor time, for
inputs that could exhaust either. `recipe: file.py` runs a Python program instead of `train_async.py`.
"""
