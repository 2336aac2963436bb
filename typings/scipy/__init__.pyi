# scipy brings no types: the modules that this project takes are of any.
