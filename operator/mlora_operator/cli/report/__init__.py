"""``mlora report``.

``command``   its options
``reporters`` TensorBoard, MLflow, Weights & Biases
"""
