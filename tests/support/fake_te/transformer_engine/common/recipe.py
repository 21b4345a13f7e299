class Recipe:
    def __init__(self, *args, **kwargs):
        self.__dict__.update(kwargs)


class DelayedScaling(Recipe):
    pass


class Float8CurrentScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    pass


class MXFP8BlockScaling(Recipe):
    pass


class NVFP4BlockScaling(Recipe):
    pass


class Format:
    E4M3 = "e4m3"
    HYBRID = "hybrid"
