"""Extensions: one folder a feature. The core must train without each of them.

`infinity.wrap_model`, `infinity.Checkpoints`, `infinity.parallel` and other public names lead here.
"""
