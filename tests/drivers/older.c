// A Vulkan driver that says of itself that it is one of Vulkan 1.2, and is the driver whose library OLDER_DRIVER names in
// everything else. The few types are those of the Vulkan headers, which the tests do not need otherwise.
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef struct { uint32_t apiVersion; } Properties;
typedef struct { uint32_t sType; void *pNext; Properties properties; } Properties2;

static Function (*driver)(void *instance, const char *name);
static void (*driver_properties)(void *device, Properties *properties);
static void (*driver_properties2)(void *device, Properties2 *properties);

static const uint32_t VULKAN_1_2 = 1u << 22 | 2u << 12 | 131;

static void properties(void *device, Properties *of) {
    driver_properties(device, of);
    of->apiVersion = VULKAN_1_2;
}

static void properties2(void *device, Properties2 *of) {
    driver_properties2(device, of);
    of->properties.apiVersion = VULKAN_1_2;
}

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
    if (!driver) *(void **)&driver = dlsym(dlopen(getenv("OLDER_DRIVER"), RTLD_NOW), "vk_icdGetInstanceProcAddr");
    Function found = driver(instance, name);
    if (found && !strcmp(name, "vkGetPhysicalDeviceProperties")) {
        *(Function *)&driver_properties = found;
        return (Function)properties;
    }
    if (found && (!strcmp(name, "vkGetPhysicalDeviceProperties2") || !strcmp(name, "vkGetPhysicalDeviceProperties2KHR"))) {
        *(Function *)&driver_properties2 = found;
        return (Function)properties2;
    }
    return found;
}

// The interface's version 5 has all that is used here.
int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
    if (*version > 5) *version = 5;
    return 0;
}
