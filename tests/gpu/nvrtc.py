"""NVRTC by ctypes: compiles kernels/*.cu to a cubin without a GPU, a driver or a toolkit.

The library comes from $NVRTC_LIB, else from the `nvidia-cuda-nvrtc` wheel of this Python, else from the system.
"""
import ctypes
import ctypes.util
import glob
import hashlib
import os
import re
import site
import sys

KERNELS = os.environ.get("KERNELS", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "kernels"))


def _library():
    if os.environ.get("NVRTC_LIB"):
        return os.environ["NVRTC_LIB"]
    roots = site.getsitepackages() + sys.path
    for root in roots:
        for pattern in ("nvidia/cu13/lib/libnvrtc.so*", "nvidia/cuda_nvrtc/lib/libnvrtc.so*"):
            found = [p for p in sorted(glob.glob(os.path.join(root, pattern))) if ".alt." not in p]
            if found:
                return found[0]
    for path in sorted(glob.glob("/usr/local/cuda*/lib64/libnvrtc.so")):
        return path
    return ctypes.util.find_library("nvrtc")


_lib = None


def lib():
    global _lib
    if _lib is None:
        path = _library()
        for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so*")):
            if ".alt." not in builtins:
                ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        _lib = ctypes.CDLL(path)
    return _lib


def _text(get_size, get, program):
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw[: size.value]


class CompileError(Exception):
    pass


def source(name):
    with open(os.path.join(KERNELS, name)) as f:
        return f.read()


def compile(name, arch, macros, extra=()):
    """(cubin, log) of kernels/<name>.cu for `arch` such as sm_90a; macros is a dict."""
    n = lib()
    options = [f"-arch={arch}", "--std=c++17", "--ptxas-options=-v", "--ptxas-options=--warn-on-spills"]
    options += [f"-D{k}={v}" for k, v in macros.items()] + list(extra)
    text, header = source(name + ".cu").encode(), source("common.cuh").encode()
    program = ctypes.c_void_p()
    headers, names = (ctypes.c_char_p * 1)(header), (ctypes.c_char_p * 1)(b"common.cuh")
    n.nvrtcCreateProgram(ctypes.byref(program), text, (name + ".cu").encode(), 1, headers, names)
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    status = n.nvrtcCompileProgram(program, len(options), array)
    log = _text(n.nvrtcGetProgramLogSize, n.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
    if status:
        n.nvrtcDestroyProgram(ctypes.byref(program))
        raise CompileError(f"{name} {arch} {macros}\n{log}")
    cubin = _text(n.nvrtcGetCUBINSize, n.nvrtcGetCUBIN, program)
    n.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin, log


def cached(name, arch, macros, folder):
    """compile() with a folder of cubins named by everything that decides them."""
    key = hashlib.sha256(repr((source(name + ".cu"), source("common.cuh"), arch, sorted(macros.items()))).encode()).hexdigest()[:24]
    path = os.path.join(folder, f"{name}-{arch}-{key}.cubin")
    if not os.path.exists(path):
        cubin, log = compile(name, arch, macros)
        os.makedirs(folder, exist_ok=True)
        with open(path + f".{os.getpid()}.log", "w") as f:
            f.write(log)
        os.replace(path + f".{os.getpid()}.log", path + ".log")
        with open(path + f".{os.getpid()}", "wb") as f:
            f.write(cubin)
        os.replace(path + f".{os.getpid()}", path)
    with open(path, "rb") as f, open(path + ".log") as g:
        return f.read(), g.read()


def resources(log):
    """{kernel: (registers, spilled bytes, static shared bytes)} and the warnings that matter."""
    found, kernel, spills = {}, None, 0
    for line in log.splitlines():
        m = re.search(r"Compiling entry function '(\w+)'|Function properties for (\w+)", line)
        if m:
            kernel = m.group(1) or m.group(2)
        m = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if m:
            spills = int(m.group(1)) + int(m.group(2))
        m = re.search(r"Used (\d+) registers", line)
        if m:
            smem = re.search(r"(\d+) bytes smem", line)
            found[kernel] = (int(m.group(1)), spills, int(smem.group(1)) if smem else 0)
    warnings = [l for l in log.splitlines() if re.search(r"warning|C75\d\d", l, re.I) and "C7517" not in l]
    return found, warnings
